"""Two windows that vLLM served on an H200, predicted from its profile: passes that overlap.

    python -m benchmarks.engines.gpu_windows [--fit FILE] [--json FILE]

Takes some seconds. Needs nothing else: the windows' requests and what clients measured are in
docs/results/data/h200-windows.json; the profile and the fit are those that ship as
llama-3.1-8b-h200-measured, made by benchmarks.engines.gpu_profile and llmctl fit.

Rows of each window: by the fit alone; at the speed that the warm-up before it showed; with the
warm-up's front, too; and in hindsight, with the front that the window itself had, and with its
launches. Nothing is adjusted to the window but in these last two rows. The second window found
prompts of the first one in the cache, so it is simulated after that. `front_mean_s` is that of the
whole simulation.

Then the coefficients of the profile's law, each with its standard error in percent: the law is
fitted again without each twentieth of the profile's points (a jackknife). Last, how far off it is
held out by points, of all points and of short prompts from idle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import markdown
from toolkit.estimators.pipeline_fit import (
    LAUNCH_TERMS,
    SHORT_TOKENS,
    PassSequence,
    fit_law,
    graphs_of,
    held_out_s,
)
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.profile import Profile, StepsProfile
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path, shipped_profiles
from toolkit.metrics import Served, summarize
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import SharedBlocks, Trace

NAME = "llama-3.1-8b-h200-measured"
WINDOWS = ROOT / "docs/results/data/h200-windows.json"
FIT = "the fit alone"
SPEED = "the warm-up's speed"
FRONT = "the warm-up's speed and front"
OWN_FRONT = "the warm-up's speed, the window's own front"
HINDSIGHT = "the window's own front and launches"
REST_S = 1000.0  # between two windows
PARTS = 20  # of a profile's points, for standard errors
SHOWN = ("throughput_rps", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "e2e_mean_s")


def trace_of(rows: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Trace:
    """The window's requests after those `before`, which have the same prompts in turn."""
    table = np.array([*before, *rows])
    arrival_s = table[:, 0] / 1e3
    if len(before):
        arrival_s[len(before) :] += arrival_s[len(before) - 1] + REST_S
    prompts = table[:, 1].astype(np.int64)
    outputs = table[:, 2].astype(np.int64)
    shared = shared_prompts(prompts, len(before)) if len(before) else None
    return Trace(arrival_s, prompts, outputs, outputs.copy(), shared=shared)


def shared_prompts(prompts: np.ndarray, first: int) -> SharedBlocks:
    """The blocks of prompts: request k of each window has the k-th stream of random tokens."""
    size = 16
    numbers = [*range(first), *range(len(prompts) - first)]
    blocks: list[int] = []
    offsets = [0]
    for number, tokens in zip(numbers, prompts.tolist(), strict=True):
        blocks += [1000 * number + k for k in range(-(-tokens // size))]
        offsets.append(len(blocks))
    return SharedBlocks(size, np.array(blocks, np.int64), np.array(offsets, np.int64))


def conditions_of(window: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return what each row of a window knows: slowdown, launch_slowdown and front_first_s, as far
    as it is not the fit's.
    """
    warmup = window["warmup"]
    speed = {name: warmup[name] for name in ("slowdown", "launch_slowdown")}
    own = window["hindsight"]
    front = speed | {"front_first_s": own["front_first_s"]}
    return {FIT: {}, SPEED: speed, FRONT: warmup, OWN_FRONT: front, HINDSIGHT: own}


def in_conditions(engine: PagedEngine, known: dict[str, float]) -> PagedEngine:
    """Return the engine as a row of a window knows it."""
    slowed = engine.slowed(known.get("slowdown", 1.0))
    factor = known.get("launch_slowdown", 1.0) / known.get("slowdown", 1.0)
    terms = slowed.steps.terms
    launches = {term: factor * terms[term] for own in LAUNCH_TERMS.values() for term in own}
    engine = replace(slowed, steps=slowed.steps.with_terms(launches))
    if "front_first_s" in known:
        engine = replace(engine, front_s=known["front_first_s"], front_row_s=0.0)
    return engine


def predicted(
    fit: Fit,
    recipe: Recipe,
    windows: Sequence[dict[str, Any]],
    place: int,
    known: dict[str, float],
) -> dict[str, float]:
    """Return a window's metrics by the fit, in the conditions that are `known`."""
    window = windows[place]
    before = windows[window["after"]]["requests"] if window["after"] is not None else []
    trace = trace_of(window["requests"], before)
    policy = make_any(recipe.policy.name, recipe.policy.parameters)
    world = world_from_fit(fit, workers=1, max_new_tokens=recipe.serve.max_new_tokens)
    assert world.paged is not None, "the fit is of vLLM"
    world = replace(world, paged=in_conditions(world.paged, known))
    result = simulate(trace, policy, world)
    front = {"front_mean_s": result.metrics({})["front_mean_s"]}
    return summarize(result.served.after(len(before)), {}) | front


def measured(window: dict[str, Any]) -> dict[str, float]:
    """The window's figures as its clients measured them."""
    table = np.array(window["requests"])
    sent_s, ttft_s, e2e_s = table[:, [0, 3, 4]].T / 1e3
    outputs = table[:, 2].astype(np.int64)
    all_ok = np.ones(len(table), dtype=np.bool_)
    # the largest gaps were not measured
    served = Served(sent_s, sent_s + ttft_s, sent_s + e2e_s, outputs, np.zeros(len(table)), all_ok)
    return summarize(served, {})


def errors_of(fit: Fit) -> list[dict[str, Any]]:
    """Return the error of each figure in percent, for each window and what is known of it."""
    windows = json.loads(WINDOWS.read_text(encoding="utf-8"))["windows"]
    recipe = load_recipe(recipe_path(NAME))
    found = []
    for place, window in enumerate(windows):
        truth = measured(window)
        for knows, known in conditions_of(window).items():
            said = predicted(fit, recipe, windows, place, known)
            error = {name: 100.0 * (said[name] / truth[name] - 1.0) for name in SHOWN}
            row = {"rate_rps": window["rate_rps"], "knows": knows, "error": error}
            found.append(row | {"measured": truth, "front_s": said["front_mean_s"]})
    return found


def standard_errors(passes: PassSequence) -> list[tuple[str, float, float]]:
    """Return each coefficient of a law that is not 0, with its standard error in percent."""
    law = fit_law(passes, np.ones(len(passes.seconds), dtype=bool))
    part = np.random.default_rng(0).permutation(passes.point[-1] + 1) % PARTS
    parts = [fit_law(passes, part[passes.point] != number) for number in range(PARTS)]
    found = []
    for name, value in law.terms.items():
        values = np.array([one.terms[name] for one in parts])
        if value:
            spread = math.sqrt((PARTS - 1) / PARTS * np.square(values - values.mean()).sum())
            found.append((name, value, 100.0 * spread / value))
    return found


def held_out(measured: StepsProfile, passes: PassSequence) -> list[tuple[str, int, float, float]]:
    """Return how many points there are, and the median and p95 of their held-out errors: of all,
    and of short prompts from idle.
    """
    seconds = np.bincount(passes.point, passes.seconds) / np.bincount(passes.point)
    off = 100.0 * np.abs(held_out_s(passes, 0) / seconds - 1.0)
    short = np.array([one.idle and one.prefill_tokens <= SHORT_TOKENS for one in measured.points])
    kinds = {"all": off, f"from idle, up to {SHORT_TOKENS} tokens": off[short]}
    return [
        (kind, len(one), float(np.median(one)), float(np.percentile(one, 95)))
        for kind, one in kinds.items()
    ]


def main() -> None:
    """Print five rows for each window, and the law."""
    parser = make_parser(__doc__)
    folder = shipped_profiles() / NAME
    parser.add_argument(
        "--fit", type=Path, default=folder / "fit.json", help="default: the shipped one"
    )
    given = parser.parse_args()
    rows: list[list[str]] = []
    for row in errors_of(read_file(Fit, given.fit)):
        rate = f"{row['rate_rps']:g}"
        if row["knows"] == FIT:
            rows.append([rate, "measured", *(f"{row['measured'][name]:.4g}" for name in SHOWN), ""])
        errors = (f"{row['error'][name]:+.1f} %" for name in SHOWN)
        rows.append([rate, row["knows"], *errors, f"{1e3 * row['front_s']:.1f} ms"])
    print(markdown(["requests/s", "with", *SHOWN, "front_mean_s"], rows, words=2))
    measured = read_file(Profile, folder / "profile.json").steps
    assert measured is not None
    graphs = graphs_of(measured)
    assert graphs is not None
    passes = PassSequence.of(measured, graphs)
    law = [[name, f"{value:.4g}", f"{off:.1f} %"] for name, value, off in standard_errors(passes)]
    print(markdown(["coefficient", "seconds", "standard error"], law))
    off = [
        [kind, f"{points:,}", f"{median:.1f} %", f"{most:.0f} %"]
        for kind, points, median, most in held_out(measured, passes)
    ]
    print(markdown(["points", "number", "held out, median", "p95"], off))


if __name__ == "__main__":
    main()
