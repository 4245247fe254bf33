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
from benchmarks.engines.live import Replay, Work, add_work, error, replay, report_of
from toolkit.deploy.order import ALLOW_BROKEN
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file
from toolkit.files.tuning import Tuning
from toolkit.traces.types import trace_path

SYSTEMS = ("defaults", "tuned")
GOODPUT = "goodput_rps"
SHOWN = {
    "throughput_rps": ("requests/s", ".3f"),
    "ttft_mean_s": ("TTFT mean s", ".3f"),
    "tpot_mean_s": ("TPOT mean s", ".4f"),
    "mtpot_p99_s": ("MTPOT p99 s", ".3f"),
}


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
    tuned = ["--tuning", "tuning.json", ALLOW_BROKEN, "--out", "tuned.json"]
    work.llmctl("render", recipe, *fit, *tuned)


def row(name: str, run: BenchReport) -> str:
    """Return a run's figures, with the errors at the warm-up's speed and as fitted."""
    cells = [name, f"{run.measured[GOODPUT]:.3f}"]
    for metric, (_, form) in SHOWN.items():
        measured = run.measured[metric]
        both = run.predicted[metric], run.predicted_as_fitted[metric]
        errors = [error(metric, one, measured) for one in both]
        cells.append(f"{measured:{form}} | {errors[0]:+.1f} ({errors[1]:+.1f})")
    before = run.warmup.slowdown if run.warmup else 1.0
    return f"| {' | '.join([*cells, f'{before:.2f}/{run.replay_slowdown or 1.0:.2f}'])} |"


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
    runs: dict[str, list[BenchReport]] = {system: [] for system in SYSTEMS}
    for repeat in range(given.repeats):
        for system in SYSTEMS if repeat % 2 == 0 else SYSTEMS[::-1]:
            one = Replay(f"{system}.json", f"{system}-{repeat + 1}.json", words)
            replay(work, [one])
            runs[system].append(report_of(work, one))
    tuning = read_file(Tuning, work.folder / "tuning.json")
    flags = ", ".join(f"{key}={value}" for key, value in tuning.recommended.parameters.items())
    gain = "-" if tuning.gain_percent is None else f"{tuning.gain_percent:+.1f} % goodput"
    print(f"{tuning.request_rate_rps:.3g} requests/s; {flags}: {gain} predicted")
    titles = " | ".join(f"{title} | error (as fitted)" for title, _ in SHOWN.values())
    print(f"\n| flags | goodput/s | {titles} | slowdown before/in the replay |")
    print(f"|---|{'---:|' * (2 * len(SHOWN) + 1)}---|")
    for system, found in runs.items():
        for number, report in enumerate(found, start=1):
            print(row(f"{system} {number}", report))
    pairs = zip(runs["tuned"], runs["defaults"], strict=True)
    ratios = ", ".join(
        f"{tuned.measured[GOODPUT] / usual.measured[GOODPUT]:.2f}" for tuned, usual in pairs
    )
    print(f"\nGoodput of the tuned flags over that of vLLM's defaults, repeat by repeat: {ratios}.")


if __name__ == "__main__":
    main()
