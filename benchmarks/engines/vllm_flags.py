"""vLLM's flags from `llmctl tune` against vLLM's defaults, measured beside predicted.

    python -m benchmarks.engines.vllm_flags --work DIR --vllm-python PYTHON --trace azure.csv

Takes about ten minutes with one repeat on a quiet machine. Needs an environment with vLLM 0.32 and
a trace.

It runs `llmctl profile`, `fit`, `tune` and `render`. Then, `--repeats` times, it starts vLLM's own
server under either plan, in alternating order, and replays a window that the tuning held out
(`llmctl bench --tuning`). Errors are in percent.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.engines.live import GOODPUT, Work, add_work, table
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.tuning import Tuning
from toolkit.traces.types import trace_path

SYSTEMS = ("defaults", "tuned")


def prepare(work: Work, trace: str, rate: float | None) -> None:
    """The tuning, and two plans: with vLLM's defaults and with the flags that were found.

    The comparison continues where these break the recipe's limits.
    """
    fit = ["--fit", work.fit()]
    recipe = str(work.recipe)
    given = ["--rate", str(rate)] if rate else []
    codes = (0, LimitsBrokenError.exit_code)
    work.llmctl("tune", recipe, *fit, "--trace", trace, *given, codes=codes)
    work.llmctl("render", recipe, *fit, "--policy", "vllm", "--out", "defaults.json")
    tuned = ["--tuning", "tuning.json", "--force", "--out", "tuned.json"]
    work.llmctl("render", recipe, *fit, *tuned)


def main() -> None:
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny-llama-vllm.yaml")
    parser.add_argument(
        "--trace", default="chat-small", help="a trace's file, or a shipped trace's name"
    )
    parser.add_argument(
        "--rate", type=float, help="requests per second; default: the recipe's load"
    )
    parser.add_argument(
        "--warmup", type=float, default=2.0, help="seconds of other requests before each replay"
    )
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    work = Work(given, given.recipe.absolute())
    trace = str(trace_path(given.trace).absolute())
    if not work.has("tuned.json"):
        prepare(work, trace, given.rate)
    words = ["--trace", trace, "--tuning", "tuning.json", "--warmup", str(given.warmup)]
    runs: dict[str, BenchReport] = {}
    for repeat in range(1, given.repeats + 1):
        for system in SYSTEMS if repeat % 2 else SYSTEMS[::-1]:
            plan = f"{system}.json"
            out = f"{system}-{repeat}.json"
            if not work.has(out):
                with work.serving(plan) as url:
                    work.bench(url, plan, out, *words, apart=True)
            runs[f"{system} {repeat}"] = read_file(BenchReport, work.folder / out)
    tuning = read_file(Tuning, work.folder / "tuning.json")
    flags = ", ".join(
        f"{key}={value}" for key, value in tuning.recommended.settings.parameters.items()
    )
    gain = "-" if tuning.gain_percent is None else f"{tuning.gain_percent:+.1f} % goodput"
    print(f"{tuning.request_rate_rps:.3g} requests/s; {flags}: {gain} predicted\n")
    print(table(dict(sorted(runs.items()))))
    goodput = {name: run.measured.metrics[GOODPUT] for name, run in runs.items()}
    ratios = ", ".join(
        f"{goodput[f'tuned {repeat}'] / goodput[f'defaults {repeat}']:.2f}"
        for repeat in range(1, given.repeats + 1)
    )
    print(f"Goodput of the tuned flags over that of vLLM's defaults, repeat by repeat: {ratios}.")


if __name__ == "__main__":
    main()
