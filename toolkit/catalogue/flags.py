"""The flags of `vllm serve`: how a command line is read, and what llmctl makes of each flag and of
each variable of the environment.

data/vllm_flags.yaml has one row for each flag of releases 0.28 to 0.33, and vllm_variables.yaml
patterns of names. A new flag is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from toolkit.catalogue.tables import read_table
from toolkit.errors import InputError, nearest

# modelled: a key of the recipe has it. measured: it decides what a measurement finds. ignored: no
# pass, cache or order depends on it. left out: it cannot go into a recipe. refused: it asks for
# what llmctl does not model.
What = Literal["modelled", "measured", "ignored", "left out", "refused"]


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """What llmctl makes of a flag of `vllm serve`.

    Attributes:
        what: see `What`.
        why: the reason, in words; of a modelled flag the key of the recipe that holds it.
        caches: it decides what the caches hold, which laws from operators do not know.
        cls: the class of `catalogue.classes` that it turns on; '': none.
        says: what a server with that class has, in words.
        most: the largest number that turns nothing on; None: its value is no such number.
        plain: the values that turn nothing on.
        switch: it has no value.
    """

    what: What
    why: str = ""
    caches: bool = False
    cls: str = ""
    says: str = ""
    most: float | None = None
    plain: tuple[str, ...] = ()
    switch: bool = False

    def turns_on(self, value: str) -> bool:
        """Return whether the flag with this value turns its class on."""
        if not self.cls:
            return False
        if self.plain:
            return value not in self.plain
        if self.most is None:
            return True
        is_number = value.replace(".", "", 1).isdecimal()
        return bool(value) and not (is_number and float(value) <= self.most)


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag on a command line.

    Attributes:
        name: as the table has it; of `--no-...` with a row of its own, that one.
        value: its first value; '': none.
        negated: it is given as `--no-...`.
        path: the keys of a value in JSON, of `--flag.key.other value`.
        words: as they were typed.
    """

    name: str
    value: str = ""
    negated: bool = False
    path: tuple[str, ...] = ()
    words: Sequence[str] = field(default_factory=list)


@cache
def known_flags() -> dict[str, KnownFlag]:
    """Return what llmctl makes of each flag, by its name."""
    found: dict[str, KnownFlag] = {}
    switches: set[str] = set()
    for row in read_table("vllm_flags"):
        match row["what"]:
            case "switches":
                switches |= set(row["flags"])
            case "short names":
                pass
            case "modelled":
                found |= {name: KnownFlag("modelled", key) for name, key in row["keys"].items()}
            case "refused":
                _add_refused(found, row)
            case what:
                known = KnownFlag(what, row["why"], row.get("caches", False))
                found |= dict.fromkeys(row["flags"], known)
    return {name: replace(one, switch=name in switches) for name, one in found.items()}


def _add_refused(found: dict[str, KnownFlag], row: dict[str, dict[str, list[str]]]) -> None:
    """Add the classes of flags; a flag that is modelled stays so."""
    for name, (cls, says) in row["switches"].items():
        found[name] = replace(found.get(name, KnownFlag("refused")), cls=cls, says=says)
    for name, (cls, most) in row["numbers"].items():
        found[name] = replace(found.get(name, KnownFlag("refused")), cls=cls, most=float(most))
    for name, (cls, *plain) in row["choices"].items():
        found[name] = replace(found.get(name, KnownFlag("refused")), cls=cls, plain=tuple(plain))
    for name in row["by_content"]:
        found[name] = KnownFlag("refused")


@cache
def short_names() -> dict[str, str]:
    """Return the flags of other spellings, such as -tp."""
    (row,) = (row for row in read_table("vllm_flags") if row["what"] == "short names")
    return dict(row["flags"])


def of_variable(name: str) -> tuple[What, str]:
    """Return what llmctl makes of a variable of vLLM's environment, and why."""
    return next(
        (row["what"], row["why"])
        for row in _variables()
        if any(fnmatchcase(name, pattern) for pattern in row["names"])
    )


@cache
def _variables() -> list[dict[str, Any]]:
    return read_table("vllm_variables")


def read_flags(words: Sequence[str], *, strict: bool = False) -> tuple[list[GivenFlag], list[str]]:
    """Return the flags of a command line, and the words that belong to none.

    vLLM's parser takes `--flag value`, `--flag=value`, `--flag.key value`, underscores for hyphens,
    and the beginning of a name that no other flag has.

    Raises `InputError` with `strict` for a flag that vLLM does not have, with the nearest.
    """
    flags: list[GivenFlag] = []
    free: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word == "-" or word[1:2].isdigit():
            free.append(word)
            continue
        typed, has_value, value = word.partition("=")
        typed, *path = typed.split(".")
        name, negated = _named(typed, strict=strict)
        if name == typed and typed[:2] == "-O" and typed[2:]:  # -O3
            name, value, has_value = "--optimization-level", typed[2:], "="
        used = [word]
        known = known_flags().get(name)
        is_switch = negated or (known is not None and known.switch)
        while not is_switch and not has_value and left and not _is_flag(left[0]):
            used.append(left.pop(0))
            if known is None or name not in MANY:
                break
        if not has_value and len(used) > 1:
            value = used[1]
        flags.append(GivenFlag(name, value, negated, tuple(path), used))
    return flags, free


MANY = {  # flags that take several words
    *("--lora-modules", "--api-key", "--allowed-media-domains", "--served-model-name"),
    *("--sleep-preserve-parameter-names", "--logits-processors", "--ignore-patterns"),
    *("--numa-bind-nodes", "--numa-bind-cpus", "--kv-cache-dtype-skip-layers"),
    *("--cpu-offload-params", "--offload-params", "--lora-target-modules"),
    *("--collect-detailed-traces", "--cudagraph-capture-sizes"),
}


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit()


def _named(typed: str, *, strict: bool) -> tuple[str, bool]:
    """Return the name of a flag as the table has it, and whether it is negated."""
    known = known_flags()
    name = typed.replace("_", "-") if typed.startswith("--") else typed
    name = short_names().get(name, name)
    if name in known:
        return name, False
    positive = f"--{name.removeprefix('--no-')}"
    if name.startswith("--no-") and positive in known:
        return positive, True
    begun = [one for one in known if one.startswith(name)] if name.startswith("--") else []
    if len(begun) == 1:
        return begun[0], False
    if strict and not (name[:2] == "-O" and name[2:]):
        hint = nearest(name, [*known, *short_names()])
        raise InputError(f"vLLM has no flag {typed[:80]}", hint)
    return name, False
