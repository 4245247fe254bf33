"""Unseen servers: runs of vLLM in MLPerf Inference v5.1, asked for by the commands themselves:

    llmctl recipe new MODEL --gpu GPU --gpus N --tensor-parallel-size N > recipe.yaml
    llmctl profile recipe.yaml --analytic; llmctl fit profile.json
    llmctl simulate recipe.yaml --fit fit.json --trace FILE

    python -m benchmarks.public.mlperf --data RESULTS --lengths DASHBOARD --entry COMMIT \\
        --page docs/results/scoreboard.md --json docs/results/data/mlperf-COMMIT.json

RESULTS is the git directory (a bare clone, or `.git` of a checkout) of
mlcommons/inference_results_v5.1, DASHBOARD that of openshift-psap/performance-dashboard, which has
the lengths of the prompts of MLPerf's data sets. Both are read at HEAD.

No law and no constant is here, and none was set on these runs. A run is put into the words of a
recipe: model, GPU, copies of the model, tensor parallelism, and the flags that its README gives.
Requests arrive as LoadGen's do: all at once (Offline), or as a Poisson process (Server). A run that
a command refuses is listed with its reason. COMMIT names the product that was asked: the page keeps
the figures of every entry.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep, markdown
from benchmarks.public.asking import llmctl
from benchmarks.public.scoreboard import percent, put_section
from toolkit.catalogue.models import kv_bytes_per_token
from toolkit.profiling.analytic import ONE_BY_ONE
from toolkit.traces.types import Trace
from toolkit.traces.write import write_trace

SOURCE = "mlcommons/inference_results_v5.1, MLCommons, Apache-2.0; submissions of Krai and Red Hat"
SEED = 51
RUN = re.compile(r"(open/Krai|closed/RedHat)/results/(.+)/performance/run_1/mlperf_log_summary.txt")
GPUS = {"H100-SXM": "h100-sxm", "H200-SXM": "h200", "MI300X": "mi300x", "L40S": "l40s"}
# A model to its name in the catalogue and its data set. Llama-3.3-70B has the shapes of 3.1.
MODELS = {
    "llama3.1-8b": ("llama-3.1-8b", "llama3-1-8b-datacenter"),
    "llama3_1-70b": ("llama-3.3-70b", "llama2-70b-99"),
    "llama2-70b": ("llama-2-70b", "llama2-70b-99"),
}
# closed/RedHat/code/llama3.1-8b/README.md; the last option is what its harness asks for
RED_HAT = {
    "XE8640_4xH100_vLLM/llama3.1-8b/Server": "--max-model-len 131072 --gpu-memory-utilization 0.91 "
    "--max-num-batched-tokens 1024 --max-num-seqs 512 --long-prefill-token-threshold 256 "
    "--max-tokens 128",
    "XE8640_4xH100_vLLM/llama3.1-8b/Offline": "--max-model-len 131072 --max-num-seqs 1024 "
    "--kv-cache-dtype fp8 --max-num-batched-tokens 4096 --max-tokens 128",
    "IBM_Cloud_gx3-48x240x2l40s_vLLM/llama3.1-8b/Server": "--kv-cache-dtype fp8 "
    "--max-model-len 2668 --gpu-memory-utilization 0.96 --max-tokens 128",
    "IBM_Cloud_gx3-48x240x2l40s_vLLM/llama3.1-8b/Offline": "--kv-cache-dtype fp8 "
    "--max-model-len 2668 --max-num-seqs 512 --long-prefill-token-threshold 256 "
    "--max-num-batched-tokens 16384 --gpu-memory-utilization 0.95 --max-tokens 128",
}
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
TIMES = {  # a metric, and LoadGen's name for it; in ns
    "ttft_mean_s": "Mean First Token latency (ns)",
    "ttft_p99_s": "99.00 percentile first token latency (ns)",
    "tpot_mean_s": "Mean Time to Output Token (ns)",
    "tpot_p99_s": "99.00 percentile time to output token (ns)",
}
AS_STATED = ""
VARIED = (
    "other draws",
    "answers all of the mean length",
    "prompts all of the mean length",
    "prompts a sixth shorter",
    "prompts a third shorter",
)
BEYOND = "extrapolated_batches_percent"  # of passes, beyond what the fit was made from

# ---- runs ----


@dataclass(frozen=True)
class Run:
    """A run as it was measured.

    Attributes:
        software: the framework, such as vLLM v0.9.2.
        flags: of vLLM; `tp` and `dp` are the ranks of a copy and the copies.
        queries: number of requests.
        rate_rps: of their arrivals; 0: all come at once.
        output_mean: tokens of an answer.
        outputs: tokens of the hundred answers that the run's compliance test (TEST06) logs.
        measured: `rps` and, of a server, the metrics of `TIMES`.
    """

    name: str
    gpu: str
    software: str
    model: str
    dataset: str
    flags: Mapping[str, str]
    queries: int
    rate_rps: float
    output_mean: float
    outputs: Sequence[int]
    measured: Mapping[str, float]


def git(folder: Path, *words: str) -> str:
    """What git prints of a git directory."""
    done = subprocess.run(["git", f"--git-dir={folder}", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr.strip()}")
    return done.stdout


def read_runs(data: Path) -> list[Run]:
    """The runs of Krai and Red Hat, by their names."""
    paths = git(data, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    cases = [found.groups() for path in paths if (found := RUN.fullmatch(path))]
    return [
        read_run(data, home, case, *names)
        for home, case in cases
        for start, names in MODELS.items()
        if f"/{start}" in case
    ]


def read_run(data: Path, home: str, case: str, model: str, dataset: str) -> Run:
    """The run of a submitter's folder: its case is SYSTEM/MODEL/SCENARIO."""

    def show(path: str) -> str:
        return git(data, "show", f"HEAD:{home}/{path}")

    described = json.loads(show(f"systems/{case.partition('/')[0]}.json"))
    summary = numbers_in(show(f"results/{case}/performance/run_1/mlperf_log_summary.txt"))
    log = show(f"results/{case}/performance/run_1/mlperf_log_detail.txt")
    counts = re.findall(r'"generated_(?:query_count|samples_per_query)", "value": (\d+)', log)
    answers = show(f"compliance/{case}/TEST06/accuracy/mlperf_log_accuracy.json")
    server = "Scheduled samples per second" in summary
    rps = summary["Completed samples per second" if server else "Samples per second"]
    tokens_per_s = summary["Completed tokens per second" if server else "Tokens per second"]
    return Run(
        name=f"{home.partition('/')[2]} {case}",
        gpu=described["accelerator_model_name"],
        software=described["framework"].partition(",")[0],
        model=model,
        dataset=dataset,
        flags=flags_in(RED_HAT.get(case) or show(f"measurements/{case}/README.md")),
        queries=max(map(int, counts)),
        rate_rps=summary["Scheduled samples per second"] if server else 0.0,
        output_mean=tokens_per_s / rps,
        outputs=[int(count) for count in re.findall(r'"token_count" : (\d+)', answers)],
        measured={"rps": rps}
        | {key: 1e-9 * summary[name] for key, name in TIMES.items() if server},
    )


def numbers_in(summary: str) -> dict[str, float]:
    """The numbers of LoadGen's summary, by their names."""
    lines = re.findall(r"^([^:\n]+?)\s*:\s*([\d.]+)$", summary, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def flags_in(text: str) -> dict[str, str]:
    """The options of a command line, or of the performance run in a README of Krai's."""
    command = text.partition("### Performance")[2].partition("###")[0] or text
    found = re.findall(r"([\w-]+)[= ]([\w.]+)", command)
    return {name.strip("-").replace("-", "_"): value for name, value in found}


def prompts_of(lengths: Path, dataset: str) -> NDArray[np.int64]:
    """Tokens of each prompt of a data set; OpenOrca's are those of Llama-2's tokenizer."""
    text = git(lengths, "show", f"HEAD:mlperf-data/summaries/{dataset}.csv")
    return np.array([int(row["input_length"]) for row in csv.DictReader(text.splitlines())])


# ---- predictions ----


def trace_of(run: Run, prompts: NDArray[np.int64], varied: str = AS_STATED) -> Trace:
    """The requests of a run: whole permutations of the data set, as LoadGen issues them, with
    lengths of answers drawn from those that TEST06 logs, scaled to the mean of the run.
    """
    drawn = np.random.default_rng(SEED + (varied == "other draws"))
    count = run.queries
    orders = [drawn.permutation(len(prompts)) for _ in range(-(-count // len(prompts)))]
    asked = prompts[np.concatenate(orders)[:count]].astype(float)
    answers = drawn.choice(np.array(run.outputs), count).astype(float)
    answers *= run.output_mean / answers.mean()
    arrival_s = np.zeros(count)
    if run.rate_rps:
        arrival_s = np.cumsum(drawn.exponential(1.0 / run.rate_rps, count))
    if varied == "answers all of the mean length":
        answers[:] = run.output_mean
    if varied == "prompts all of the mean length":
        asked[:] = asked.mean()
    if varied == "prompts a sixth shorter":
        asked *= 5 / 6
    if varied == "prompts a third shorter":
        asked *= 2 / 3
    limit = int(run.flags.get("max_tokens", sys.maxsize))
    outputs = np.clip(np.rint(answers), 1, limit).astype(np.int64)
    return Trace(arrival_s, np.rint(asked).astype(np.int64), outputs, outputs.copy())


@dataclass(frozen=True)
class Answer:
    """What llmctl says of a run, by the names of `Run.measured` and `BEYOND`, or why it says
    nothing.
    """

    name: str
    varied: str
    predicted: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""


def ask(run: Run, prompts: NDArray[np.int64], varied: str = AS_STATED) -> Answer:
    """Type the commands for a run."""
    if "vllm" not in run.software.lower():
        return Answer(run.name, varied, refused=f"{run.software}: only vLLM is modelled")
    with TemporaryDirectory() as name:
        folder = Path(name)
        try:
            made = llmctl("recipe", "new", *words_of(run), folder=folder)
            (folder / "recipe.yaml").write_text(with_flags(made, run.flags), encoding="utf-8")
            llmctl("profile", "recipe.yaml", "--analytic", folder=folder)
            llmctl("fit", "profile.json", folder=folder)
            write_trace(trace_of(run, prompts, varied), folder / "trace.jsonl")
            words = ["recipe.yaml", "--fit", "fit.json", "--trace", "trace.jsonl"]
            found = json.loads(llmctl("simulate", *words, "--json", folder=folder))
        except subprocess.CalledProcessError as error:
            [said, *_] = error.stderr.splitlines()
            return Answer(run.name, varied, refused=said.removeprefix("error: "))
    rps = (found["requests"] - found["failed"]) / found["makespan_s"]
    return Answer(run.name, varied, {"rps": rps} | {key: found[key] for key in (*TIMES, BEYOND)})


def words_of(run: Run) -> list[str]:
    """The words of `recipe new` for a run."""
    ranks = int(run.flags.get("tp", 1))
    words = {
        "--gpu": next((name for word, name in GPUS.items() if word in run.gpu), run.gpu),
        "--gpus": int(run.flags.get("dp", 1)) * ranks,
        "--tensor-parallel-size": ranks,
        "--quantization": "fp8",
        "--max-model-len": run.flags.get("max_model_len", 131072),
    }
    return [run.model, *(str(word) for pair in words.items() for word in pair)]


def with_flags(made: str, flags: Mapping[str, str]) -> str:
    """The recipe that `recipe new` printed, with a run's flags. Its vLLM does not plan ahead."""
    recipe = yaml.safe_load(made)
    recipe["policy"].setdefault("parameters", {})
    recipe["policy"]["parameters"] |= {key: int(flags[key]) for key in LIMITS if key in flags}
    recipe["engine"]["gpu_memory_utilization"] = float(flags.get("gpu_memory_utilization", 0.9))
    started = recipe["engine"].setdefault("vllm", {})
    started["args"] = [*started.get("args", ()), ONE_BY_ONE]
    if dtype := flags.get("kv_cache_dtype"):
        started["kv_cache_dtype"] = dtype
        found = kv_bytes_per_token(recipe["model"]["config"], dtype)
        recipe["model"]["kv_bytes_per_token"] = found[0] if found else None
    return yaml.safe_dump(recipe)


def answers_of(lengths: Path, cases: Iterable[tuple[Run, str]], processes: int) -> list[Answer]:
    """An answer for each run and what is varied, in their order; each goes to stderr, too."""
    found = []
    with ProcessPoolExecutor(processes) as pool:
        asked = [pool.submit(ask, run, prompts_of(lengths, run.dataset), how) for run, how in cases]
        for each in asked:
            found.append(each.result())
            print(found[-1], file=sys.stderr, flush=True)
    return found


# ---- errors ----

HEADS = {
    "rps": "requests/s",
    "ttft_mean_s": "mean TTFT, s",
    "ttft_p99_s": "p99 TTFT, s",
    "tpot_mean_s": "mean TPOT, s",
    "tpot_p99_s": "p99 TPOT, s",
}
MOST_PERCENT = 1000.0  # a larger error is written as a factor


def errors_of(run: Run, answer: Answer) -> dict[str, float]:
    """The errors of an answer in percent, signed, by the names of `Run.measured`."""
    return {key: percent(answer.predicted[key], value) for key, value in run.measured.items()}


def words_for(error: float) -> str:
    """An error as a cell has it."""
    return f"{error:+.1f} %" if error < MOST_PERCENT else f"x {1 + error / 100:.0f}"


def sizes_of(errors: Sequence[Mapping[str, float]]) -> list[str]:
    """The median size of each error, as cells."""
    sizes = [[abs(one[key]) for one in errors if key in one] for key in HEADS]
    return [words_for(float(np.median(one))).lstrip("+") if one else "-" for one in sizes]


def tables(entry: str, runs: Sequence[Run], answers: Sequence[Answer]) -> str:
    """Each run beside its prediction by the product of `entry`, why others are refused, and what
    other traffic would change.
    """
    at = {run.name: run for run in runs}
    groups: dict[str, dict[str, dict[str, float]]] = {AS_STATED: {}}  # what is varied, run, errors
    lines: list[list[object]] = []
    for one in answers:
        if one.refused:
            continue
        run = at[one.name]
        errors = groups.setdefault(one.varied, {})[one.name] = errors_of(run, one)
        if one.varied != AS_STATED:
            continue
        cells = {
            key: f"{run.measured[key]:.4g}, {one.predicted[key]:.4g}: {words_for(errors[key])}"
            for key in errors
        }
        beyond = f"{one.predicted.get(BEYOND, 0.0):.0f}"
        lines.append([run.name, *(cells.get(key, "-") for key in HEADS), beyond])
    stated = groups.pop(AS_STATED)
    sizes = sizes_of([*stated.values()])
    lines.append(["**median size of the error**", *sizes, "-"])
    changed = [[name, *sizes_of([*group.values()])] for name, group in groups.items()]
    refused = [one for one in answers if one.refused]
    text = [
        markdown(
            [f"measured, predicted by {entry}: error", *HEADS.values(), "beyond the fit, %"], lines
        ),
        f"Refused, {len(refused)} of {len(runs)} runs:\n",
        *(f"- {one.name}: {one.refused}" for one in refused),
        "",
    ]
    if changed:
        text.append("Median sizes of errors where other traffic is assumed:\n")
        text.append(
            markdown([f"assumed, by {entry}", *HEADS.values()], [["as stated", *sizes], *changed])
        )
    return "\n".join(text)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="RESULTS")
    parser.add_argument("--lengths", type=Path, required=True, metavar="DASHBOARD")
    parser.add_argument("--entry", required=True, metavar="COMMIT", help="of the product")
    parser.add_argument("--page", type=Path, metavar="FILE", help="replace its section")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="runs with TEXT in their names")
    parser.add_argument("--vary", action="store_true", help="ask with other traffic, too")
    options = parser.parse_args()
    runs = [run for run in read_runs(options.data) if options.only in run.name]
    answers = answers_of(options.lengths, [(run, AS_STATED) for run in runs], options.processes)
    if options.vary:
        served = {one.name for one in answers if not one.refused}
        cases = [(run, varied) for varied in VARIED for run in runs if run.name in served]
        answers += answers_of(options.lengths, cases, options.processes)
    text = tables(options.entry, runs, answers)
    print(text)
    keep("source", SOURCE)
    keep("entry", options.entry)
    at = {run.name: run for run in runs}
    stated = [one for one in answers if one.varied == AS_STATED and not one.refused]
    keep("errors", {one.name: errors_of(at[one.name], one) for one in stated})
    keep("answers", [asdict(one) for one in answers])
    if options.page:
        put_section(options.page, f"mlperf {options.entry}", text)


if __name__ == "__main__":
    main()
