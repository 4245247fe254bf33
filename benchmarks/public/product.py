"""The judged servers, each predicted by the commands that a user would type:

    llmctl recipe new MODEL --gpu GPU --tensor-parallel-size N > recipe.yaml
    llmctl profile recipe.yaml --analytic; llmctl fit profile.json
    llmctl simulate --fit fit.json --recipe recipe.yaml --trace FILE --concurrency N

    python -m benchmarks.public.product --aiconfigurator DIR --page docs/results/scoreboard.md \\
        --errors toolkit/estimators/elsewhere.json --json docs/results/data/product.json

Takes twenty minutes on two shared cores; --journal FILE keeps every answer, and goes on from there.
DIR is a checkout of ai-dynamo/aiconfigurator. No law and no constant is here: a row is only put
into the words of a recipe and of options. These are its model, GPU, precision, parallelism, lengths
and concurrency, and the flags of its protocol (`benchmarks.public.servers`). Where llmctl refuses a
flag, it is asked without it, and the row says so. A row that it refuses is counted by reason.

With --errors it writes the file of errors that ships and that commands quote; with --page it
replaces its section of the page.
"""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep, markdown
from benchmarks.public.operators import CORE, GPUS
from benchmarks.public.scoreboard import put_section
from benchmarks.public.servers import (
    IN_MXFP4,
    MODELS,
    Protocol,
    Row,
    protocol_of,
    split_rows,
    trace_of,
)
from benchmarks.public.silicon import percent
from toolkit.catalogue.models import kv_bytes_per_token
from toolkit.cli.profile import fit as fit_laws
from toolkit.cli.profile import profile as measure
from toolkit.cli.recipe import new as new_recipe
from toolkit.cli.simulate import command as simulate
from toolkit.errors import InputError
from toolkit.files.profile import MEASURED_SECTIONS
from toolkit.traces.write import write_trace

# ---- what a row says, in llmctl's words ----

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
KEPT = {True: ["lm_head", "*self_attn*"], False: ["lm_head"]}  # in 16 bits; True: with experts
USUAL_LENGTH = 8192  # `max_model_len` where --max-model-len is not given
EXPERT_PARALLEL = "--enable-expert-parallel"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as `recipe new` takes it: its config.json, and what vLLM shall quantize it to."""

    config: Mapping[str, Any]
    quantization: str = ""


def checkpoint_of(data: Path, row: Row) -> Checkpoint:
    """The checkpoint of a row's model in its precision."""
    path = data / CORE / "model_configs" / f"{MODELS[row.model]}_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if row.precision == "fp4" and row.model not in IN_MXFP4:
        kept = KEPT["num_local_experts" in config]
        return Checkpoint(config | {"quantization_config": {**NVFP4, "exclude_modules": kept}})
    if row.precision == "fp8" and "quantization_config" not in config:
        return Checkpoint(config, "fp8")
    return Checkpoint(config)


def write_recipe(
    row: Row,
    protocol: Protocol,
    checkpoint: Checkpoint,
    folder: Path,
    flags: Mapping[str, Any],
) -> Path:
    """The recipe that `recipe new` prints, in `folder`, with the protocol's settings and with
    `flags` in `engine.vllm`. `InputError` for what is refused.
    """
    model = folder / row.model
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
    longest = row.prompt + row.output
    text = said(
        new_recipe,
        model=str(model),
        gpu=GPUS[row.gpu][0],
        tensor_parallel_size=row.ranks,
        quantization=checkpoint.quantization,
        max_model_len=longest if longest > USUAL_LENGTH else None,
    )
    recipe = yaml.safe_load(text)
    recipe["policy"]["parameters"] = {
        "max_num_seqs": protocol.rows,
        "max_num_batched_tokens": protocol.tokens,
    }
    recipe["engine"]["gpu_memory_utilization"] = protocol.share
    recipe["serve"]["max_new_tokens"] = row.output
    if flags:
        recipe["engine"]["vllm"] = dict(flags)
    if dtype := flags.get("kv_cache_dtype"):  # `recipe new` writes the bytes of 16 bits
        found = kv_bytes_per_token(recipe["model"]["config"], dtype)
        recipe["model"]["kv_bytes_per_token"] = found[0] if found else None
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def flags_of(row: Row, protocol: Protocol) -> dict[str, Any]:
    """The section `engine.vllm` of a row's recipe; empty where its server had vLLM's defaults."""
    found: dict[str, Any] = {}
    if protocol.cache_bytes == 1:
        found["kv_cache_dtype"] = "fp8"
    if protocol.whole_experts or row.expert_ranks > 1:
        found["args"] = [EXPERT_PARALLEL]
    return found


def said(command: Callable[..., None], **options: Any) -> str:
    """What a command prints on stdout. `InputError` for what it refuses."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        command(**options)
    return printed.getvalue()


# ---- predictions ----


@dataclass(frozen=True, slots=True)
class Answer:
    """What llmctl says of a row: how far its mean TPOT and TTFT are off, in percent and signed, or
    why it says nothing. What was measured stays with its source.

    Attributes:
        gpu, ..., concurrency: `Row.setting`, which repeats of a measurement share.
        experts: whether the model has experts, by the fit.
        without: flags of the server that llmctl refuses, so that it was asked without them.
        refused: why there is no prediction; "": there is one.
    """

    name: str
    gpu: str
    model: str
    precision: str
    version: str
    ranks: int
    expert_ranks: int
    data_ranks: int
    prompt: int
    output: int
    concurrency: int
    experts: bool = False
    tpot_percent: float = 0.0
    ttft_percent: float = 0.0
    without: str = ""
    refused: str = ""

    @property
    def setting(self) -> tuple[Any, ...]:
        """As `Row.setting`."""
        return astuple(self)[1:11]


def ask(row: Row, checkpoint: Checkpoint, protocol: Protocol) -> Answer:
    """Type the commands for one row: with the flags of its server, else without them."""
    flags = flags_of(row, protocol)
    named = [f"{key} {value}" for key, value in flags.items() if key != "args"]
    without = ", ".join([*named, *flags.get("args", ())])
    own = Answer(row.name, *row.setting)
    with TemporaryDirectory() as name:
        folder = Path(name)
        for asked, lacking in [(flags, ""), ({}, without)] if flags else [({}, "")]:
            try:
                recipe = write_recipe(row, protocol, checkpoint, folder, asked)
                fit = write_fit(recipe)
                times = simulated(row, protocol, recipe, fit)
            except InputError as error:
                own = replace(own, refused=error.message)
                continue
            steps = json.loads(fit.read_text(encoding="utf-8"))["steps"]
            return replace(
                own,
                experts=steps["experts"] > 0,
                tpot_percent=round(percent(times["tpot_mean_s"], row.tpot_s), 1),
                ttft_percent=round(percent(times["ttft_mean_s"], row.ttft_s), 1),
                without=lacking,
                refused="",
            )
    return own


_FITS: dict[str, str] = {}  # of this process: the text of a fit, by what a profile depends on


def write_fit(recipe: Path) -> Path:
    """The fit of a recipe, beside it, as `profile --analytic` and `fit` make it. Recipes that
    differ in nothing that a profile depends on share one. `InputError` for what is refused.
    """
    sections = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    measured = json.dumps({name: sections.get(name) for name in MEASURED_SECTIONS})
    path = recipe.with_name("fit.json")
    if measured not in _FITS:
        profile = recipe.with_name("profile.json")
        said(measure, recipe=recipe, analytic=True, out=profile)
        said(fit_laws, profile=profile, out=path)
        _FITS[measured] = path.read_text(encoding="utf-8")
    path.write_text(_FITS[measured], encoding="utf-8")
    return path


def simulated(row: Row, protocol: Protocol, recipe: Path, fit: Path) -> dict[str, float]:
    """The metrics that `simulate` prints for a row's requests; `InputError` for a refused one."""
    trace = recipe.with_name("trace.jsonl")
    write_trace(trace_of(row, protocol), trace)
    printed = said(
        simulate,
        fit=str(fit),
        recipe=recipe,
        trace=str(trace),
        concurrency=row.concurrency,
        as_json=True,
    )
    found: dict[str, float] = json.loads(printed)
    served = found["requests"]
    if served != protocol.requests * row.concurrency:
        raise InputError(f"only {served:g} requests of the row are served")
    return found


def answers_of(
    data: Path, rows: Sequence[Row], journal: Path | None, processes: int
) -> list[Answer]:
    """An answer for each row, in their order; progress goes to stderr. Those of the journal are
    taken from it, and new ones are added to it.
    """
    found = {one.name: one for one in read_journal(journal)}
    left = [row for row in rows if row.name not in found]
    with ProcessPoolExecutor(processes) as pool:
        asked = [pool.submit(ask, row, checkpoint_of(data, row), protocol_of(row)) for row in left]
        for done in as_completed(asked):
            answer = done.result()
            found[answer.name] = answer
            print(f"\r{len(found)} of {len(rows)} rows", end="", file=sys.stderr, flush=True)
            if journal is not None:
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(astuple(answer)) + "\n")
    print(file=sys.stderr)
    return [found[row.name] for row in rows]


def read_journal(journal: Path | None) -> list[Answer]:
    """The answers of an interrupted run; none without a file."""
    if journal is None or not journal.exists():
        return []
    lines = journal.read_text(encoding="utf-8").splitlines()
    return [Answer(*json.loads(line)) for line in lines]


# ---- errors ----


def servers_of(answers: Iterable[Answer]) -> list[Answer]:
    """The answered servers, each once: of one that was measured repeatedly, the median errors."""
    repeats: dict[tuple[Any, ...], list[Answer]] = {}
    for one in answers:
        if not one.refused:
            repeats.setdefault(one.setting, []).append(one)
    return [
        replace(
            same[0],
            tpot_percent=float(np.median([one.tpot_percent for one in same])),
            ttft_percent=float(np.median([one.ttft_percent for one in same])),
        )
        for same in repeats.values()
    ]


def spread_of(servers: Sequence[Answer]) -> dict[str, float]:
    """The sizes of the errors of some servers, in percent, by the names of `AnalyticError`."""
    found: dict[str, float] = {"servers": len(servers)}
    for name in ("tpot", "ttft"):
        sizes = [abs(getattr(one, f"{name}_percent")) for one in servers]
        median, p90 = np.percentile(sizes, [50, 90])
        found[f"{name}_percent"] = round(float(median), 1)
        found[f"{name}_p90_percent"] = round(float(p90), 1)
    return found


def errors_of(answers: Iterable[Answer]) -> dict[str, Any]:
    """The content of the file that ships: errors by GPU and class of model, and of all servers."""
    servers = servers_of(answers)
    groups: dict[tuple[str, bool], list[Answer]] = {}
    for one in servers:
        groups.setdefault((one.gpu, one.experts), []).append(one)
    return {
        "about": "Errors of servers predicted by recipe new, profile --analytic, fit and simulate, "
        "in percent (docs/results/scoreboard.md)",
        "source": "ai-dynamo/aiconfigurator, silicon_sample.csv, Apache-2.0, NVIDIA",
        "all": spread_of(servers),
        "groups": [
            {"gpu": gpu, "experts": experts, **spread_of(group)}
            for (gpu, experts), group in sorted(groups.items())
        ],
    }


ERRORS = ("median, %", "p90, %", "bias, %")
COLUMNS = ("servers", *(f"{name}: {error}" for name in ("TPOT", "TTFT") for error in ERRORS))


def tables(answers: Sequence[Answer]) -> str:
    """How many rows are answered and how far off, and why the others are not, as Markdown."""
    servers = servers_of(answers)
    refused = Counter(one.refused for one in answers if one.refused)
    answered = len(answers) - sum(refused.values())
    lines = [
        f"Of {len(answers)} judged rows {answered} are answered, {len(servers)} servers. "
        f"{sum(refused.values())} are refused:",
        "",
        *(f"- {reason}: {count} rows" for reason, count in refused.most_common()),
        "",
        markdown(["answered", *COLUMNS], [line_of(*pair) for pair in lines_of(servers).items()]),
    ]
    return "\n".join(lines)


def lines_of(servers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The lines of the table: all; each GPU and class; each model, and with each number of GPUs;
    these of all dense models; what was asked without a flag.
    """
    lines: dict[str, list[Answer]] = {"**all**": list(servers)}
    for one in sorted(servers, key=lambda one: (one.setting, one.name)):
        chip = one.gpu.partition("_")[0].upper()
        kind = "with experts" if one.experts else "dense"
        model = f"{chip}, {one.model} {one.precision}"
        for name in (f"**{chip}, {kind}**", model, f"{model}, TP {one.ranks}"):
            lines.setdefault(name, []).append(one)
    for ranks in sorted({one.ranks for one in servers}):
        group = [one for one in servers if one.ranks == ranks and not one.experts]
        lines[f"dense, TP {ranks}"] = group
    for without in sorted({one.without for one in servers if one.without}):
        lines[f"asked without {without}"] = [one for one in servers if one.without == without]
    lines["asked as they were started"] = [one for one in servers if not one.without]
    return {name: group for name, group in lines.items() if group}


def line_of(name: str, servers: Sequence[Answer]) -> list[object]:
    """A line of the table."""
    spread = spread_of(servers)
    cells: list[object] = [name, len(servers)]
    for key in ("tpot", "ttft"):
        bias = np.median([getattr(one, f"{key}_percent") for one in servers])
        sizes = (spread[f"{key}_percent"], spread[f"{key}_p90_percent"])
        cells += [*(f"{size:.1f}" for size in sizes), f"{bias:+.1f}"]
    return cells


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True, metavar="DIR")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="answers so far")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace its section")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="what ships")
    options = parser.parse_args()
    rows = split_rows(options.aiconfigurator).judged
    answers = answers_of(options.aiconfigurator, rows, options.journal, options.processes)
    text = tables(answers)
    print(text)
    keep("columns", [each.name for each in fields(Answer)])
    keep("rows", [list(astuple(one)) for one in answers])
    if options.page:
        put_section(options.page, "product", text)
    if options.errors:
        content = json.dumps(errors_of(answers), indent=1)
        options.errors.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
