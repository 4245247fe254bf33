"""How a vLLM server is started, read from a command line of a shell.

`vllm serve MODEL --flag ...`, `python -m vllm.entrypoints.openai.api_server --model MODEL`, and
both inside `docker run IMAGE ...`; with `export NAME=VALUE` and `NAME=VALUE` before it, over
several lines. Nothing is run: variables are replaced by the values that the text gives them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from toolkit.catalogue.flags import GivenFlag, read_flags
from toolkit.errors import InputError

API_SERVER = re.compile(r"vllm\.entrypoints\.(openai\.)?api_server")
IMAGE = re.compile(r"[^\s=]*vllm[^\s=]*(:[\w.-]+|@sha256:\w+)?")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
# $NAME, ${NAME}, ${NAME:-default}, and Kubernetes' $(NAME)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|\((\w+)\)|(\w+))")
OPERATORS = re.compile(r"[;&|\n]+")
# Options of `docker run` with a value that may look like the image.
NAMED = (
    *("-v", "--volume", "--mount", "--name", "--network", "--net", "--hostname", "-h", "-w"),
    *("--workdir", "-l", "--label", "--env-file", "--entrypoint", "--runtime"),
)
CONTAINER_PROGRAMS = ("docker", "podman", "nerdctl")
SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash")


@dataclass(frozen=True, slots=True)
class FoundServer:
    """How one vLLM server is started.

    Attributes:
        name: of the server where it was found; '': it has none.
        model: as vLLM gets it: a hub id or a folder.
        flags: of vLLM, in the order of the command.
        variables: of its environment.
        replicas: servers like it.
        gpus: that each may use; 0: nothing says.
        gpu: what says which; '': nothing does.
        beside: what stands beside it and is not vLLM's: what it is, and what it does.
    """

    name: str
    model: str
    flags: Sequence[GivenFlag]
    variables: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    gpus: int = 0
    gpu: str = ""
    beside: Sequence[tuple[str, str]] = ()


def read_command(text: str) -> FoundServer:
    """Return the server that a command of a shell starts.

    Raises `InputError` where the text starts no vLLM server or several, where a variable has no
    value, and for a flag that vLLM does not have.
    """
    variables: dict[str, str] = {}
    found: list[FoundServer] = []
    for words in commands_of(text):
        own = dict(variables)
        rest = list(words)
        if rest[:1] == ["export"]:
            variables |= dict(_assignments(rest[1:]))
            continue
        while rest and (match := ASSIGNMENT.fullmatch(rest[0])):
            own[match[1]] = match[2]
            rest.pop(0)
        if not rest:
            variables = own
            continue
        rest, inside = _inside_container(rest)
        if (server := server_of(rest, own | inside)) is not None:
            has_file = any(word.startswith("--env-file") for word in words)
            found.append(replace(server, beside=[("--env-file", "is not read")] * has_file))
    if len(found) != 1:
        what = "starts no vLLM server" if not found else f"starts {len(found)} vLLM servers"
        hint = "give one `vllm serve MODEL ...`, or `docker run ... IMAGE MODEL ...`"
        raise InputError(f"the command {what}", hint)
    return found[0]


def commands_of(text: str) -> list[list[str]]:
    """Return the commands of a shell script, each in words. Raises `InputError` for quotes without
    an end.
    """
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\[ \t]*(\n|$)", " ", "\n".join(lines))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise InputError(f"the command cannot be read: {str(error).lower()}", "quote it") from None
    commands: list[list[str]] = [[]]
    is_comment = False
    for word in words:
        if OPERATORS.fullmatch(word):
            commands.append([])
            is_comment = False
        elif word.startswith("#") or is_comment:
            is_comment = True
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def server_of(words: Sequence[str], variables: Mapping[str, str]) -> FoundServer | None:
    """Return the server that a command starts; None: it starts none. A container's image and what
    is before it may be left out.
    """
    start = _arguments_at(words)
    if start is None:
        return None
    arguments = [_replaced(word, variables) for word in words[start:]]
    flags, free = read_flags(arguments, strict=True)
    named = [flag.value for flag in flags if flag.name == "--model"]
    models = free or named[-1:]
    if len(free) > 1:
        raise InputError(
            f"the command has {len(free)} words beside its flags: {', '.join(free)[:200]}",
            "vLLM takes one, the model",
        )
    flags = [flag for flag in flags if flag.name != "--model"]
    return FoundServer("", models[0] if models else "", flags, dict(variables))


def _arguments_at(words: Sequence[str]) -> int | None:
    """Return where the arguments of vLLM begin; None: the command does not start it."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if word.rpartition("/")[2] == "vllm" and following == "serve":
            return at + 2
        if word == "-m" and API_SERVER.fullmatch(following):
            return at + 2
        if API_SERVER.search(word.replace("/", ".").removesuffix(".py")) and word.endswith(".py"):
            return at + 1
    return None


def _inside_container(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs in the container of `docker run`, and its variables; another
    command stays as it is.
    """
    if words[0].rpartition("/")[2] not in CONTAINER_PROGRAMS or "run" not in words:
        return list(words), {}
    at = list(words).index("run") + 1
    variables: dict[str, str] = {}
    while at < len(words) and not (IMAGE.fullmatch(words[at]) and not words[at].startswith("-")):
        if words[at] in ("-e", "--env") and at + 1 < len(words):
            variables |= dict(_assignments(words[at + 1 : at + 2]))
            at += 1
        elif words[at].startswith("--env="):
            variables |= dict(_assignments([words[at].removeprefix("--env=")]))
        elif words[at] in NAMED and at + 1 < len(words):
            at += 1
        at += 1
    return in_image(words[at + 1 :]), variables


def in_image(arguments: Sequence[str]) -> list[str]:
    """Return the whole command of vLLM's image, of which `vllm serve` is the entry."""
    words = list(arguments)
    if words[:1] and words[0] in SHELLS and len(words) > 2:
        inner = [command for command in commands_of(words[-1]) if _arguments_at(command)]
        return inner[0] if inner else words
    return words if _arguments_at(words) is not None else ["vllm", "serve", *words]


def _assignments(words: Sequence[str]) -> list[tuple[str, str]]:
    matches = map(ASSIGNMENT.fullmatch, words)
    return [(match[1], match[2]) for match in matches if match]


def _replaced(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with the values of its variables. Raises `InputError` where one has none."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4]
        if name in variables:
            return variables[name]
        if match[2] is not None:
            return match[2]
        raise InputError(
            f"the command's variable {name} has no value", f"put {name}=VALUE before the command"
        )

    return VARIABLE.sub(value, word)
