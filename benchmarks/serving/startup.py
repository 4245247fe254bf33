"""Start time of `llmctl --help` and of each command's help, beside an empty Python.

    python -m benchmarks.serving.startup [--rounds 5]

Takes about 20 s per round. Needs nothing but the package. The aim is less than 0.4 s each. The
commands alternate within each round, so that a busy moment affects all alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.common.command import make_parser
from toolkit.cli.main import COMMANDS
from toolkit.cli.output import note, progress, table

LIMIT_S = 0.4


def measure(words: list[str]) -> float:
    """Wall seconds of one process from its start to its end."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_s


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds: int = parser.parse_args().rounds
    cases = {"(empty python)": ["-c", "pass"], "llmctl --help": ["-m", "toolkit", "--help"]}
    cases |= {f"llmctl {name} --help": ["-m", "toolkit", name, "--help"] for name in COMMANDS}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    with progress("starting", rounds * len(cases)) as advance:
        for _ in range(rounds):
            for name, words in cases.items():
                samples[name].append(measure(words))
                advance(text=name)
    rows = [
        (name, min(taken), statistics.median(taken), max(taken)) for name, taken in samples.items()
    ]
    table(
        ["command", ">least s", ">median s", ">most s"],
        rows,
        title=f"{rounds} rounds, aim {LIMIT_S} s",
    )
    slow = [name for name, _, median_s, _ in rows if median_s > LIMIT_S]
    note(f"above {LIMIT_S} s: {', '.join(slow) or 'none'}")


if __name__ == "__main__":
    main()
