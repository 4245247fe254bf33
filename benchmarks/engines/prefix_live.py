"""What prompts share, live: a real vLLM on a CPU, predicted and measured.

    python -m benchmarks.engines.prefix_live --work DIR --vllm-python PYTHON --trace TRACE

Takes about 50 minutes on a quiet machine. Needs an environment with vLLM 0.32 and Mooncake's
conversation_trace.jsonl.

A Llama of 1.7 million random weights with 4,096 positions, one core, two traces: Mooncake's divided
by 16 (a block of 512 tokens becomes one of 32, vLLM's here) without prompts above 3,900 tokens, and
generated sessions. It is profiled and fitted. Then three windows of Mooncake's in open loop and
three of the sessions in closed loop (`llmctl bench`, which predicts each before it measures it),
each `--repeats` times: all in turn, then all again, since the machine's speed changes within
minutes. A prediction knows the speed from the requests that warm up before its window. The table
has the medians of the errors, in percent, and of hits in points.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.engines.live import Replay, Work, add_work, middle, replay, report_of, table
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import divide_lengths
from toolkit.traces.write import write_trace

RECIPE = Path(__file__).with_name("prefix_live.yaml")
DIVISOR = 16
LONGEST = 3_900
MOONCAKE = "mooncake.jsonl"
SESSIONS = "sessions.jsonl"
RATES = {MOONCAKE: 4.0, SESSIONS: 5.0}  # requests/s
LOOPS = {MOONCAKE: "open", SESSIONS: "closed"}
GENERATED = (
    "--rate 1 --duration 1200 --turns uniform:2:9 --think lognormal:3:0.8"
    " --prompt lognormal:150:0.7 --output lognormal:30:0.6 --longest 512 --block-tokens 32"
)
PLAN = "defaults.json"
STARTS_S = (200.0, 500.0, 800.0)  # of the three windows


def prepare(work: Work, mooncake: str) -> None:
    """The two traces, and a plan with vLLM's defaults."""
    whole, _ = read_trace(Path(trace_path(mooncake)))
    small = divide_lengths(whole, DIVISOR)
    kept = np.flatnonzero(small.prompt_tokens <= LONGEST)
    write_trace(small.take(kept), work.folder / MOONCAKE)
    work.llmctl("trace", "generate", "--out", SESSIONS, *GENERATED.split())
    fit = work.fit()
    work.llmctl("render", str(RECIPE), "--fit", fit, "--policy", "vllm", "--out", PLAN)


def main() -> None:
    parser = make_parser(__doc__)
    add_work(parser)
    parser.add_argument("--trace", required=True, help="Mooncake's conversation_trace.jsonl")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each window")
    parser.add_argument("--window", type=float, default=60.0, help="seconds of each window")
    parser.add_argument("--warmup", type=float, default=20.0, help="seconds before each window")
    given = parser.parse_args()
    work = Work(given, RECIPE)
    if not work.has(PLAN):
        prepare(work, given.trace)
    common = ["--duration", str(given.window), "--warmup", str(given.warmup)]
    by_window: dict[str, list[Replay]] = {}
    for repeat in range(1, given.repeats + 1):
        for trace, (number, start_s) in product(RATES, enumerate(STARTS_S, start=1)):
            name = f"{Path(trace).stem} {number}"
            words = ["--trace", trace, "--rate", str(RATES[trace]), "--loop", LOOPS[trace]]
            words += ["--start", str(start_s), *common]
            out = f"window-{name.replace(' ', '-')}-{repeat}.json"
            by_window.setdefault(name, []).append(Replay(PLAN, out, words))
    replay(work, [one for turn in zip(*by_window.values(), strict=True) for one in turn])
    results = []
    for name, replays in by_window.items():
        runs = [report_of(work, one) for one in replays]
        results.append({"name": name, **middle(runs)})
    print(table(results))
    keep("windows", results)


if __name__ == "__main__":
    main()
