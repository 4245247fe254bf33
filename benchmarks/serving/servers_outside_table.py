"""The tables of `servers_outside`: windows measured beside predicted, also in hindsight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from toolkit.bench.predict import predict
from toolkit.bench.session import HELD_TO
from toolkit.files.bench import Validation
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.sim.conditions import ServerConditions
from toolkit.sim.worker import FrontDelay
from toolkit.traces.types import Trace

SHOWN = {  # title, factor, format
    "throughput_rps": ("throughput", 1.0, ".2f"),
    "ttft_mean_s": ("TTFT", 1e3, ".1f"),
    "tpot_mean_s": ("TPOT", 1e3, ".2f"),
    "e2e_mean_s": ("E2E", 1e3, ".0f"),
}
LIMIT_PERCENT = 15.0


def between(folder: Path, found: Validation, seed: int) -> list[dict[str, float]]:
    """Predict every window again, with the mean of the warm-ups before and after it.

    This separates the laws' error from that of a machine that changes its speed between a warm-up
    and its window. The last window has only the warm-up before it.
    """
    plan = read_file(Plan, folder / "plan.json")
    text = (folder / f"validation-{seed}.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    predictions = []
    for number in range(1, len(found.windows) + 1):
        rows = [line for line in lines if line["part"] == "window" and line["window"] == number]
        first = lines.index(rows[0])
        keys = ("timestamp", "input_length", "output_length")
        at_ms, prompts, outputs = (np.array([row[key] for row in rows]) for key in keys)
        trace = Trace(at_ms / 1e3, prompts, outputs, np.zeros(len(rows), dtype=np.int64))
        sides = found.windows[number - 1 : number + 1]
        front_s = float(np.mean([side.front_first_s for side in sides]))
        slowdown = float(np.exp(np.mean([np.log(side.slowdown) for side in sides])))
        finished = tuple(line["output_length"] for line in lines[:first])
        conditions = ServerConditions(slowdown, FrontDelay(front_s, front_s), finished)
        predictions.append(predict(plan, trace, {}, conditions))
    return predictions


def about(server: str, profiled: Profile, found: Validation) -> str:
    points = len(profiled.prefill) + len(profiled.decode)
    requests = sum(window.requests for window in found.windows)
    failed = sum(window.failed for window in found.windows)
    windows = f"{len(found.windows)} windows, {requests} requests, {failed} failed"
    return f"**{server}**: {points} points profiled; {windows}."


def table(found: Validation, sides: Sequence[dict[str, float]]) -> list[str]:
    titles = " | ".join(SHOWN[name][0] for name in HELD_TO)
    lines = [f"| window | requests | slowdown, front | {titles} |"]
    lines.append("|" + "---|" * (3 + len(HELD_TO)))
    errors: dict[str, list[float]] = {name: [] for name in HELD_TO}
    for number, window in enumerate(found.windows, start=1):
        cells = []
        for name in HELD_TO:
            measured = window.measured[name]
            predicted = window.predicted[name]
            errors[name].append(100.0 * (predicted / measured - 1.0))
            _, scale, spec = SHOWN[name]
            cells.append(
                f"{measured * scale:{spec}} / {predicted * scale:{spec}}: {errors[name][-1]:+.1f} %"
            )
        shown = f"{window.slowdown:.2f}, {1e3 * window.front_first_s:.1f} ms"
        start = f"{number}, {window.start_s:.0f} s"
        lines.append(f"| {start} | {window.requests} | {shown} | {' | '.join(cells)} |")
    medians = " | ".join(f"**{np.median(errors[name]):+.1f} %**" for name in HELD_TO)
    both = {
        name: [
            100.0 * (side[name] / window.measured[name] - 1.0)
            for side, window in zip(sides, found.windows, strict=True)
        ]
        for name in HELD_TO
    }
    later = " | ".join(f"{np.median(both[name]):+.1f} %, {_within(both[name])}" for name in HELD_TO)
    within = " | ".join(_within(errors[name]) for name in HELD_TO)
    return [
        *lines,
        f"| median | | | {medians} |",
        f"| within {LIMIT_PERCENT:g} % | | | {within} |",
        f"| with the speed of both sides: median, within | | | {later} |",
    ]


def _within(errors: Sequence[float]) -> str:
    return f"{sum(abs(error) <= LIMIT_PERCENT for error in errors)} of {len(errors)}"
