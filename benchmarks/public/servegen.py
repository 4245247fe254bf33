"""A day of requests from ServeGen: its clients' rates and lengths, drawn as its page says.

Data: github.com/alibaba/ServeGen, the folder `data` (Apache-2.0). It holds, of production models
and for each client: the rate and the gaps' distribution in steps of 600 s (`*-trace.csv`), and
probabilities of prompt and output lengths in steps of six hours (`*-dataset.json`). It has no log
of requests, so a day is drawn: gaps from the named Gamma or Weibull distribution, and lengths each
by itself. With `--share` below 1 each request stays with that probability, so a thinned day is
less bursty than the whole. Clients without a file of lengths get the lengths of the others.

    python -m benchmarks.public.servegen --data ServeGen/data --model reason/deepseek-r1 \\
        --share 0.06 --out day.csv
"""

from __future__ import annotations

import ast
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.command import make_parser

STEP_S = 600.0
DAY_S = 86_400.0
WINDOW_S = 21_600.0  # of a distribution of lengths
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Lengths = tuple[Ints, Floats]  # tokens, and their probabilities


def gaps_of(rng: np.random.Generator, name: str, shape: float, scale: float, count: int) -> Floats:
    """Draw gaps in seconds from the distribution that ServeGen fitted."""
    if name == "Weibull":
        return scale * rng.weibull(shape, count)
    return rng.gamma(shape, scale, count)


def arrivals(file: Path, begin_s: float, share: float, rng: np.random.Generator) -> Floats:
    """Draw when the requests of a client come, in seconds from `begin_s` on, for a day."""
    found = [np.empty(0)]
    with file.open(newline="", encoding="utf-8") as lines:
        for at, rate, _, name, shape, scale in csv.reader(lines):
            offset_s = float(at) - begin_s
            if not 0.0 <= offset_s < DAY_S or float(rate) <= 0.0:
                continue
            if name not in ("Gamma", "Weibull"):  # too few requests for a fit
                count = rng.poisson(float(rate) * STEP_S * share)
                found.append(offset_s + STEP_S * rng.random(count))
                continue
            count = int(1.3 * float(rate) * STEP_S) + 64
            times_s = np.cumsum(gaps_of(rng, name, float(shape), float(scale), count))
            times_s -= rng.random() * times_s[0]  # the step begins within a gap
            times_s = times_s[times_s < STEP_S]
            found.append(offset_s + times_s[rng.random(len(times_s)) < share])
    return np.concatenate(found)


def lengths_of(file: Path, role: str) -> dict[int, Lengths]:
    """Read the probabilities of lengths, by the window's start in seconds. `role`: input or
    output; a multimodal prompt counts with its text and its images.
    """
    found = {}
    for key, window in json.loads(file.read_text(encoding="utf-8")).items():
        names = [f"{role}_tokens"]
        if names[0] not in window:
            names = ["text_tokens"]
        words = window.get(names[0])
        table = ast.literal_eval(words) if isinstance(words, str) else words
        if not table:
            continue
        tokens = np.array(list(table), dtype=np.int64)
        weights = np.array(list(table.values()), dtype=np.float64)
        found[int(float(key))] = (tokens, weights / weights.sum())
    return found


def drawn(windows: dict[int, Lengths], times_s: Floats, rng: np.random.Generator) -> Ints:
    """Draw a length for each time, from the window that it is in, or the last one before."""
    result = np.zeros(len(times_s), dtype=np.int64)
    starts = np.array(sorted(windows))
    places = np.clip(np.searchsorted(starts, times_s, side="right") - 1, 0, None)
    for place, start in enumerate(starts.tolist()):
        chosen = places == place
        tokens, weights = windows[start]
        result[chosen] = rng.choice(tokens, int(chosen.sum()), p=weights)
    return result


def clients(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of each client: rates, and lengths, which may be missing."""
    for trace in sorted(folder.glob("chunk-*-trace.csv")):
        yield trace, trace.with_name(trace.name.replace("-trace.csv", "-dataset.json"))


def day_of(folder: Path, day: int, share: float, seed: int) -> tuple[Floats, Ints, Ints]:
    """Draw a day: times in seconds, prompts and outputs in tokens, in order of time."""
    rng = np.random.default_rng(seed)
    begin_s = day * DAY_S
    times, prompts, outputs = [], [], []
    borrowed = []
    for trace, dataset in clients(folder):
        own_s = arrivals(trace, begin_s, share, rng)
        if not len(own_s):
            continue
        lengths = [lengths_of(dataset, role) if dataset.exists() else {} for role in ROLES]
        if not all(lengths):
            borrowed.append(own_s)
            continue
        times.append(own_s)
        prompts.append(drawn(lengths[0], own_s + begin_s, rng))
        outputs.append(drawn(lengths[1], own_s + begin_s, rng))
    known = len(np.concatenate(times))
    for own_s in borrowed:
        rows = rng.integers(known, size=len(own_s))
        times.append(own_s)
        prompts.append(np.concatenate(prompts)[rows])
        outputs.append(np.concatenate(outputs)[rows])
    at_s = np.concatenate(times)
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.concatenate(prompts)[order], np.concatenate(outputs)[order]


ROLES = ("input", "output")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="ServeGen's folder `data`")
    parser.add_argument("--model", default="reason/deepseek-r1", help="a folder in it")
    parser.add_argument("--day", type=int, default=0, help="which day, from 0")
    parser.add_argument("--share", type=float, default=1.0, help="of the requests that stay")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    folder = args.data / args.model
    if not folder.is_dir():
        parser.error(f"{folder}: fetch github.com/alibaba/ServeGen and name its folder data")
    at_s, prompts, outputs = day_of(folder, args.day, args.share, args.seed)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival", "prompt_tokens", "output_tokens"))
        for row in zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            writer.writerow((f"{row[0]:.2f}", max(row[1], 1), max(row[2], 1)))
    hours = [int(count) for count in np.histogram(at_s, np.arange(25) * 3600.0)[0]]
    print(f"{len(at_s):,} requests, {len(at_s) / DAY_S:.3g}/s, by hour {hours}")
    print(f"mean prompt {prompts.mean():.0f} tokens, mean output {outputs.mean():.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
