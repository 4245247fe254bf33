"""`llmctl recipe from-command`, `from-values`, `from-compose` and `from-manifest`: a recipe of a
vLLM server that exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.adopt.command import FoundServer, read_command
from toolkit.adopt.documents import chosen, servers_in
from toolkit.adopt.recipe import ReadServer, Verdict, read_server
from toolkit.catalogue.classes import HINT, TEXT_ONLY, senses_of
from toolkit.catalogue.gpus import GPUS, Gpu, gpu_of
from toolkit.cli.arguments import (
    JsonOption,
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
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import NewRecipe, Wish, new_recipe
from toolkit.files.recipe import Recipe


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
    as_json: JsonOption = False


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
    import sys

    text = sys.stdin.read() if args.command == "-" else args.command
    _show(args, read_command(text), "a command")


@command_of(FileOptions, "sla")
def from_values(args: FileOptions) -> None:
    """Print a recipe of a server in the values of vLLM's production-stack, or of llm-d's chart.

    A line on stderr for each flag and variable says what becomes of it.
    """
    _show(args, chosen(servers_in(args.file, "values"), args.name, args.file), str(args.file))


@command_of(FileOptions, "sla")
def from_compose(args: FileOptions) -> None:
    """Print a recipe of a server in a compose file.

    A line on stderr for each flag and variable says what becomes of it.
    """
    _show(args, chosen(servers_in(args.file, "compose"), args.name, args.file), str(args.file))


@command_of(FileOptions, "sla")
def from_manifest(args: FileOptions) -> None:
    """Print a recipe of a server in a Kubernetes manifest: a Deployment, a StatefulSet, a Pod, a
    LeaderWorkerSet, an InferenceService, or production-stack's VLLMRuntime.

    A line on stderr for each flag and variable says what becomes of it.
    """
    _show(args, chosen(servers_in(args.file, "manifest"), args.name, args.file), str(args.file))


def _show(args: AdoptOptions, server: FoundServer, origin: str) -> None:
    read = read_server(server)
    note(*(_line(one) for one in read.verdicts))
    made, recipe = recipe_of(args, read, origin)
    note(*made.notes)
    result = {
        "text": made.text,
        "recipe": recipe,
        "flags": read.verdicts,
        "notes": made.notes,
    }
    emit(args.as_json, result, lambda: print(made.text, end=""))


def _line(verdict: Verdict) -> str:
    return f"{verdict.what}: {verdict.subject}: {verdict.why}"


def recipe_of(args: AdoptOptions, read: ReadServer, origin: str) -> tuple[NewRecipe, Recipe]:
    """Return the recipe of a server. Raises `InputError` for what is not modelled, with all of it,
    and for what the command does not say and no option gives.
    """
    from toolkit.sched.policies import make_any  # it loads numba, which help does not need

    if read.refusal:
        raise InputError(f"the server asks for what llmctl does not model: {read.refusal}", HINT)
    server = read.server
    if not (args.model or server.model):
        raise InputError("the command names no model", "add it, or give --model")
    model = find_model(args.model or server.model)
    if args.model and server.model:  # the sizes alone are of --model
        model = replace(model, source=server.model, revision="", weights=True)
    model = read.found_model(model)
    takes = senses_of(model.config)
    if takes and TEXT_ONLY not in read.args:
        raise InputError(
            f"{model.name} takes {' and '.join(takes)}, too, which llmctl does not model",
            f"add {TEXT_ONLY} to the command: its text part is then served alone",
        )
    tensor_parallel = read.tensor_parallel
    wish = Wish(
        gpu=_gpu(args.gpu, server.gpu),
        gpus=tensor_parallel * server.replicas,
        tensor_parallel=tensor_parallel,
        quantization=read.quantization,
        max_model_len=read.max_model_len,
        targets=parse_sla(args.sla),
        traffic=lengths_of(args.trace),
        server=read.settings(origin),
    )
    made = new_recipe(model, wish)
    recipe = made.recipe()
    make_any(recipe.policy.name, recipe.policy.parameters)  # refuses what vLLM would
    return made, recipe


def _gpu(given: str, found: str) -> Gpu:
    """Return the GPU of --gpu, else of a file. Raises `InputError` where neither is known."""
    if given:
        return gpu_of(given)
    if not found:
        raise InputError("--gpu is missing", "llmctl recipe gpus lists those that are known")
    try:
        return gpu_of(found.replace("-", " "))
    except InputError:
        try:
            return gpu_of(found.removeprefix("nvidia-"))
        except InputError as error:
            raise InputError(
                f"the file's GPU '{found}' is not known", f"--gpu; {error.hint}"
            ) from None
