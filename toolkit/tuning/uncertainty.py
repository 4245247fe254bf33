"""How the fit's error moves the verdict: the held-out windows again, under laws drawn around the fitted ones.

In a draw the workers are as fast as the drawn laws say, while the scheduler goes on believing the fitted ones: that is
how it would be live. The defaults and the best meet the same draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.resample import resampled_fits, scaled_fits
from toolkit.files.fit import Fit
from toolkit.files.profile import Profile
from toolkit.files.tuning import Interval, Outcome, Uncertainty
from toolkit.sim.world import World, fleet
from toolkit.tuning.crew import Runner, collect
from toolkit.tuning.evaluate import Bench, Limits, Task
from toolkit.tuning.search import Progress

PERCENTILES = (5, 50, 95)


@dataclass(slots=True, frozen=True)
class Laws:
    """The fit, the profile that it was made from where it is at hand, and how many draws to make.

    `others` are the fits of a fleet's further kinds of workers.
    """

    fit: Fit
    profile: Profile | None
    draws: int
    seed: int
    others: tuple[Fit, ...] = ()


def uncertainty(
    bench: Bench, runner: Runner, laws: Laws, pair: tuple[Outcome, Outcome], limits: Limits, progress: Progress
) -> Uncertainty | None:
    """The verdict on the defaults and the best (`pair`) under drawn laws; None without draws."""
    if not laws.draws:
        return None
    benches = [
        replace(bench, label=f"{bench.label}, draw {k}", world=world) for k, world in enumerate(_worlds(bench, laws))
    ]
    tasks = [Task(one, outcome.policy, outcome.parameters) for one in benches for outcome in pair]
    done = collect(runner, tasks, lambda: progress(0.0))
    before, after = done[0::2], done[1::2]
    better = [(b.feasible(limits), b.score) > (a.feasible(limits), a.score) for a, b in zip(before, after, strict=True)]
    defaults, best = [one.goodput_rps for one in before], [one.goodput_rps for one in after]
    gains = [100.0 * (b / a - 1.0) for a, b in zip(defaults, best, strict=True) if a > 0]
    return Uncertainty(
        method="held-out errors" if laws.profile is None else "profile",
        draws=laws.draws,
        defaults_goodput_rps=_interval(defaults),
        best_goodput_rps=_interval(best),
        gain_percent=_interval(gains) if len(gains) == laws.draws else None,
        better_percent=100.0 * sum(better) / laws.draws,
    )


def _worlds(bench: Bench, laws: Laws) -> list[World]:
    if laws.profile is None:
        fits = scaled_fits(laws.fit, laws.draws, laws.seed)
    else:
        fits = resampled_fits(laws.profile, laws.fit, laws.draws, laws.seed)
    others = [scaled_fits(fit, laws.draws, laws.seed + k) for k, fit in enumerate(laws.others, start=1)]
    return [fleet(list(map(_drawn, bench.world.kinds, drawn))) for drawn in zip(fits, *others, strict=True)]


def _drawn(world: World, fit: Fit) -> World:
    laws, rounds = laws_from_fit(fit), world.rounds
    if rounds is not None:
        rounds = replace(rounds, latency=laws.rounds, believed=rounds.latency)
    return replace(world, latency=laws.latency, believed=world.latency, rounds=rounds)


def _interval(values: Sequence[float]) -> Interval:
    low, median, high = np.percentile(values, PERCENTILES).tolist()
    return Interval(low=low, median=median, high=high)
