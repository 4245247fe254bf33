"""How long `llmctl --help` and each command's help take to start, beside an empty Python. Aim:
under 0.4 s each.

Run: python bench/startup.py [ROUNDS]. The commands take turns within each round, so that a busy
moment hits all alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from toolkit.cli.main import COMMANDS
from toolkit.cli.output import note, progress, table

LIMIT_S = 0.4


def measure(words: list[str]) -> float:
    """Wall seconds of one process from its start to its end."""
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
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
