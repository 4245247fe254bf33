"""`llmctl recipe from-command`, `from-values`, `from-compose` and `from-manifest`: a recipe of a
vLLM server that exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from toolkit.adopt.command import FoundServer, read_command
from toolkit.adopt.documents import chosen, servers_in
from toolkit.adopt.recipe import made_recipe, read_server
from toolkit.catalogue.gpus import GPUS
from toolkit.cli.arguments import (
    ScenarioOptions,
    argument,
    command_of,
    completing,
    option,
    parse_sla,
    traces,
)
from toolkit.cli.basis import lengths_of
from toolkit.cli.output import emit, note


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptOptions(ScenarioOptions):
    gpu: str = option(
        "",
        "The GPU, a name from `llmctl recipe gpus` or the one that nvidia-smi prints; default: "
        "what the file says of its nodes.",
        autocompletion=completing(lambda: GPUS),
    )
    model: str = option(
        "",
        "Read the sizes here, where the server has a path of its container: a folder, a "
        "config.json, a known name, or a hub id.",
        metavar="MODEL",
    )
    trace: str | None = option(
        None, "The traffic to tune for, a file or a shipped one.", autocompletion=traces
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions(AdoptOptions):
    command: str = argument("The command, as one argument in quotes; -: from stdin.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(AdoptOptions):
    file: Path = argument("The YAML file.", metavar="FILE")
    name: str | None = option(None, "The server, where the file has several.")


@command_of(CommandOptions, "sla")
def from_command(args: CommandOptions) -> None:
    """Print a recipe of the server that a command starts: `vllm serve`, or `docker run` of it.

    A line on stderr for each flag and variable says what becomes of it: a key of the recipe has
    it, only a measurement knows what it does, it changes nothing, or it is refused.
    """
    text = sys.stdin.read() if args.command == "-" else args.command
    _show(args, read_command(text), "a command")


@command_of(FileOptions, "sla")
def from_file(args: FileOptions) -> None:
    """Print a recipe of a server in a YAML file: values of vLLM's production-stack or llm-d's
    chart, a compose file, or a Kubernetes manifest (a Deployment, a StatefulSet, a Pod, a
    LeaderWorkerSet, an InferenceService, or production-stack's VLLMRuntime).

    A line on stderr for each flag and variable says what becomes of it.
    """
    _show(args, chosen(servers_in(args.file), args.name, args.file), str(args.file))


def _show(args: AdoptOptions, server: FoundServer, origin: str) -> None:
    read = read_server(server)
    note(*(f"{one.what}: {one.subject}: {one.why}" for one in read.verdicts))
    made, recipe = made_recipe(
        read, origin, args.gpu, args.model, parse_sla(args.sla), lengths_of(args.trace)
    )
    note(*made.notes)
    shown = {"text": made.text, "recipe": recipe, "flags": read.verdicts, "notes": made.notes}
    emit(args.as_json, shown, lambda: print(made.text, end=""))
