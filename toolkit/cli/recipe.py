"""`llmctl recipe new`, `gpus` and `models`: a recipe for a model and a GPU, and what is known of
both.
"""

from __future__ import annotations

from dataclasses import dataclass

import typer

from toolkit.catalogue.classes import of_config, refusal
from toolkit.catalogue.gpus import GPUS, gpu_of
from toolkit.catalogue.known import KNOWN
from toolkit.catalogue.models import facts_of
from toolkit.cli.adopt import from_command, from_file
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
from toolkit.cli.output import emit, note, table
from toolkit.deploy.doctor import check_sizes
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import MOST_GPUS, Wish, new_recipe
from toolkit.report.parts import Cell
from toolkit.units import GIB, size

app = typer.Typer(
    name="recipe",
    help="Make a recipe for a model and a GPU, and list those that are known.",
    add_completion=False,
    no_args_is_help=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOptions(ScenarioOptions):
    model: str = argument(
        "A folder, a config.json, a name from `llmctl recipe models`, or a hub id.",
        metavar="MODEL",
        autocompletion=completing(lambda: KNOWN),
    )
    gpu: str = option(
        "",
        "The GPU, a name from `llmctl recipe gpus` or the one that nvidia-smi prints; required.",
        autocompletion=completing(lambda: GPUS),
    )
    gpus: int | None = option(
        None,
        "The GPUs at hand; more than one group of them makes replicas. Default: as many as the "
        f"model needs, {MOST_GPUS} at most.",
        min=1,
        max=1024,
    )
    tensor_parallel_size: int | None = option(
        None, "GPUs that share one copy of the model; default: the fewest that hold it.", min=1
    )
    expert_parallel: bool = option(
        False, "Each GPU holds whole experts, not a part of each (vLLM's expert parallelism)."
    )
    quantization: str = option(
        "", "Quantize 16-bit weights as vLLM loads them: fp8; default: as the checkpoint is."
    )
    max_model_len: int | None = option(
        None,
        "The longest prompt + output in tokens; default: 8192, or the longest of --trace, within "
        "the model's limit.",
        min=16,
    )
    trace: str | None = option(
        None,
        "Set the limits of lengths by this trace, a file or a shipped one, and tune for it.",
        autocompletion=traces,
    )


app.command("from-command")(from_command)
for name in ("from-values", "from-compose", "from-manifest"):
    app.command(name)(from_file)  # what is in a file says its form


@app.command("new")
@command_of(NewOptions, "sla")
def new(args: NewOptions) -> None:
    """Print a recipe for a model on a GPU; every figure in it has its reason.

    The sizes come from the model's config.json, the figures of the GPU from a catalogue. The
    recipe has the smallest tensor parallelism that holds the model. Notes on stderr say what is
    left for the KV cache. Nothing is loaded or measured.
    """
    if not args.gpu:
        raise InputError("--gpu is missing", "llmctl recipe gpus lists those that are known")
    wish = Wish(
        gpu=gpu_of(args.gpu),
        gpus=args.gpus,
        tensor_parallel=args.tensor_parallel_size,
        quantization=args.quantization,
        max_model_len=args.max_model_len,
        targets=parse_sla(args.sla),
        traffic=lengths_of(args.trace),
        expert_parallel=args.expert_parallel,
    )
    made = new_recipe(find_model(args.model), wish)
    recipe = made.recipe()
    for check in check_sizes(recipe):
        if check.status != "ok":
            note(f"doctor: {check.name}: {check.found}; {check.remedy}")
    note(*made.notes)
    shown = {"text": made.text, "recipe": recipe, "notes": made.notes}
    emit(args.as_json, shown, lambda: print(made.text, end=""))


@app.command("gpus")
def gpus(as_json: JsonOption = False) -> None:
    """List the GPUs of the catalogue: memory, bandwidth, FLOP/s, links, and an example of a price.

    Memory is what a process gets. FLOP/s are dense, of bf16 and fp8. --json has all figures and
    the source of each.
    """
    columns = ["GPU", ">GiB", ">GB/s", ">bf16", ">fp8", "link", ">GB/s", ">$/h"]
    rows: list[list[Cell]] = []
    for gpu in GPUS.values():
        link = gpu.link.partition(",")[0].removesuffix(" bridge between two")
        price = None if gpu.usd_per_hour is None else f"{gpu.usd_per_hour:.2f}"
        flops = (gpu.tflops["bf16"], gpu.tflops.get("fp8"))
        memory = f"{gpu.memory_gib:g}"
        name = f"{gpu.name}{' *' if gpu.measured else ''}"
        rows.append([name, memory, gpu.bandwidth_gb_s, *flops, link, gpu.link_gb_s, price])

    def show() -> None:
        table(columns, rows)
        print("bf16, fp8: dense TFLOP/s; $/h: an example; sources: --json")
        print("*: its operators were measured, so laws can be computed for it")

    emit(as_json, {"gpus": list(GPUS.values())}, show)


@app.command("models")
def models(as_json: JsonOption = False) -> None:
    """List the models with sizes that ship: `llmctl recipe new` needs no network for them."""
    columns = ["model", ">10^9", ">active", "weights", ">GiB", ">KV/token", ">context"]
    lines = []
    rows: list[list[Cell]] = []
    for model in KNOWN.values():
        facts = facts_of(model.config)
        scheme = facts.scheme.name if facts.scheme else facts.dtype
        refused = refusal(of_config(model.config))  # '': recipes are made for it
        line = {
            "name": model.name,
            "hub": model.hub,
            "revision": model.revision,
            "source": model.source,
            "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            "weight_bytes": facts.weight_bytes,
            "weights": scheme,
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "context": facts.context,
            "refused": refused,
        }
        lines.append(line)
        name = f"{model.name}{' *' if refused else ''}"
        sizes = [f"{count / 1e9:.3g}" for count in (facts.parameters, facts.active_parameters)]
        weights_gib = f"{facts.weight_bytes / GIB:.1f}"
        cache = size(facts.kv_bytes_per_token)
        rows.append([name, *sizes, scheme, weights_gib, cache, facts.context])

    def show() -> None:
        table(columns, rows)
        print("*: not yet; --json says why, and the sources")

    emit(as_json, {"models": lines}, show)
