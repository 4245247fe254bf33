"""From the passes of a profile, in order, to the law of overlapping passes: alternating least
squares.

A pass ends with its own work or with the launch of the next pass. Which of the two it was follows
from the law; given that, the law is linear. So the fit alternates: the recursion of
`toolkit.laws.passes`, behind the measured ends of the passes before, finds what each pass waited
for; then relative least squares find the terms of launches and of the GPU, each from the passes
that show them.

Where a profile has launch times, these take the place of the law's launches, and show themselves.
Without them a launch shows only where a pass waited for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.estimators.least_squares import (
    HELD_OUT_PARTS,
    SAMPLES_COUNTED_MAX,
    TYPICAL_MAX,
    Floats,
    percent_error,
    solve_passes,
)
from toolkit.files.profile import StepPoint, StepsProfile
from toolkit.laws.features import (
    ALONE,
    ARITHMETIC,
    EAGER,
    FEATURES,
    GRAPH,
    MIXED,
    PIECEWISE,
    READS,
    StepShape,
)
from toolkit.laws.passes import GraphSettings, PassLaw, overlapped

Flags = NDArray[np.bool_]

ROUNDS = 8  # of the alternation; it changes nothing after five or six
SHOWN_MIN = 6  # passes that a group of coefficients is fitted from, at least
SHORT_TOKENS = 512  # a pass with chunks of more tokens is limited by arithmetic
GPU_MIN_S = 1e-4  # a shorter rest between two ends says nothing of the GPU
QUANTILES = 16  # of the eager launches' spread: numbers of four bits

LAUNCH_TERMS = {
    GRAPH: ("graph", "graph_row"),
    PIECEWISE: ("piece", "piece_row"),
    EAGER: ("eager", "eager_chunk"),
}

# Where the alternation begins. Any guess of this order of magnitude leads to the same law.
FIRST_GUESS = {
    "pass_read": 5e-3,
    "token_alone": 1e-5,
    "cached_alone": 3e-8,
    "token_arithmetic": 2e-5,
    "attended": 1e-9,
    "cached_beside": 3e-8,
    "graph": 2e-3,
    "graph_row": 0.0,
    "piece": 5e-3,
    "piece_row": 0.0,
    "eager": 2e-2,
    "eager_chunk": 0.0,
}


def shape_of(point: StepPoint) -> StepShape:
    """The composition of a measured pass."""
    return StepShape(
        point.decodes,
        round(point.decode_cached),
        point.prefills,
        point.prefill_tokens,
        point.prefill_attended,
        point.prefill_cached,
        round(point.decode_inside),
        point.prefill_inside,
        draft_tokens=point.draft_tokens,
    )


@dataclass(frozen=True, slots=True)
class PassSequence:
    """The passes of a profile in order, [n] each. Passes of a point count alike, as its mean.

    Attributes:
        guess: the law where the alternation begins, with every term.
        counts: what each term of `guess` counts in each pass.
        seconds: from the end of the pass before (from idle: from scheduling) to the pass's tokens.
        launches: seconds of its launch; 0: not known.
        launch: GRAPH, PIECEWISE or EAGER.
        mixed: it has chunks.
        idle: no pass was under way when it was scheduled.
        point: the number of its point.
        root_weight: the square root of its weight.
    """

    guess: PassLaw
    counts: dict[str, Floats]
    seconds: Floats
    launches: Floats
    launch: NDArray[np.int_]
    mixed: Flags
    idle: Flags
    point: NDArray[np.int_]
    root_weight: Floats

    @classmethod
    def of(cls, measured: StepsProfile, graphs: GraphSettings) -> PassSequence:
        """Return the passes of a profile; `graphs`: how its engine launches them."""
        guess = PassLaw(
            FIRST_GUESS | ({"expert_read": 0.0} if measured.experts else {}),
            experts=measured.experts,
            experts_per_token=measured.experts_per_token,
            graphs=graphs,
        )
        points = measured.points
        sizes = [len(point.seconds) for point in points]
        shapes = [shape_of(point) for point in points]
        number = np.repeat(np.arange(len(points)), sizes)
        idle = np.array([point.idle for point in points])[number]
        idle = idle & (np.diff(number, prepend=-1) > 0)
        idle[0] = True
        weights = np.array([min(size, SAMPLES_COUNTED_MAX) / size for size in sizes])
        columns = np.array(guess.columns(shapes))[number]
        return cls(
            guess=guess,
            counts=dict(zip(guess.terms, columns.T, strict=True)),
            seconds=np.concatenate([point.seconds for point in points]),
            launches=np.concatenate([p.launch_s or [0.0] * len(p.seconds) for p in points]),
            launch=np.array([graphs.launch_of(shape) for shape in shapes])[number],
            mixed=np.array([shape.prefills > 0 for shape in shapes])[number],
            idle=idle,
            point=number,
            root_weight=np.sqrt(weights)[number],
        )

    def columns(self, terms: Sequence[str]) -> Floats:
        """Return what each of the terms counts in each pass [n, k]."""
        return np.stack([self.counts[term] for term in terms], axis=1)

    def part_s(self, law: PassLaw, part: int) -> Floats:
        """Return the seconds of the terms of one part [n], as if it applied to all passes."""
        own = [term for term in law.terms if part in FEATURES[term].parts]
        seconds: Floats = self.columns(own) @ np.array([law.terms[term] for term in own])
        return seconds

    def work_s(self, law: PassLaw) -> Floats:
        """Return the seconds of each pass on the GPU."""
        least_s = np.maximum(self.part_s(law, READS), self.part_s(law, ARITHMETIC))
        return np.where(self.mixed, least_s + self.part_s(law, MIXED), self.part_s(law, ALONE))

    def launch_s(self, law: PassLaw) -> Floats:
        """Return the seconds of each launch by the law."""
        by_launch = [self.part_s(law, launch) for launch in LAUNCH_TERMS]
        return np.asarray(np.choose(self.launch, by_launch), dtype=np.float64)


def timeline(passes: PassSequence, law: PassLaw, *, measured: bool) -> tuple[Floats, Flags, Floats]:
    """Return how the passes follow one another by a law, by the recursion of `toolkit.laws.passes`
    over all runs, each from idle. Three columns [n]:

    - seconds from the tokens of the pass before (from idle: from its scheduling) to its tokens;
    - whether it ended with the launch of the next pass;
    - seconds from when the GPU could begin the pass to its end.

    With `measured`, each pass follows the measured ends and launches of the passes before it, which
    says what it waited for. Without, nothing measured comes in but the passes' compositions.
    """
    launch_s = passes.launch_s(law)
    if measured:
        launch_s = np.where(passes.launches > 0.0, passes.launches, launch_s)
    launch = [*launch_s.tolist(), 0.0]  # of the pass behind the last, too
    idle = [*passes.idle.tolist(), True]
    graph = (passes.launch == GRAPH).tolist()
    apart = law.apart
    found = []
    before_s = 0.0  # the tokens of the pass before the one before
    for k, (work_s, seconds) in enumerate(
        zip(passes.work_s(law).tolist(), passes.seconds.tolist(), strict=True)
    ):
        if idle[k]:
            # of the pass before: the end of its launch, its end on the GPU, its tokens
            scheduled_s = launched_s = done_s = end_s = 0.0
        elif idle[k - 1]:
            scheduled_s = 0.0 if apart else launched_s
        else:
            scheduled_s = before_s
        launched_s, gpu_begins_s, done_s = overlapped(
            scheduled_s, launched_s, done_s, launch[k], work_s, waits=graph[k], apart=apart
        )
        tokens_s = done_s
        if not idle[k + 1] and not apart:
            next_s = launched_s if idle[k] else end_s
            tokens_s = max(done_s, next_s + launch[k + 1])
        for_launch = tokens_s > done_s
        took_s = tokens_s - end_s
        before_s = end_s
        end_s = end_s + seconds if measured else tokens_s
        found.append((took_s, for_launch, end_s - gpu_begins_s))
        if measured:
            done_s = min(done_s, end_s) if for_launch else end_s
    took, waited, on_gpu = (np.array(column) for column in zip(*found, strict=True))
    return took, waited, on_gpu


def fit_law(passes: PassSequence, seen: Flags) -> PassLaw:
    """Return the law that the passes show, of which the fit may use those that are `seen` [n].

    The coefficients of launches that no pass had are 0. Without launch times in the profile,
    launches that no pass waited for stay as guessed: shorter than what hid them.
    """
    law = passes.guess
    for _ in range(ROUNDS):
        _, waited, gpu_s = timeline(passes, law, measured=True)
        of, seconds, weight = _shown_launches(passes, waited, seen)
        for launch, terms in LAUNCH_TERMS.items():
            its = passes.launch[of] == launch
            law = _with(law, terms, its, passes.columns(terms)[of], seconds, weight)
        law = _with_work(law, passes, waited, gpu_s, seen)
    for launch, terms in LAUNCH_TERMS.items():
        if not (passes.launch == launch).any():
            law = law.with_terms(dict.fromkeys(terms, 0.0))
    return law


def _shown_launches(
    passes: PassSequence, waited: Flags, seen: Flags
) -> tuple[NDArray[np.int_], Floats, Floats]:
    """Return the launches [k] that are known, or else that a pass `waited` for [n], of passes that
    are `seen` [n]: their passes, seconds and roots of weights.
    """
    if passes.launches.any():
        of = np.flatnonzero((passes.launches > 0.0) & seen)
        return of, passes.launches[of], passes.root_weight[of]
    shown = np.flatnonzero(waited & ~passes.idle & seen)
    # Such a pass lasts as long as the launch of the next one.
    return shown + 1, passes.seconds[shown], passes.root_weight[shown]


def _with_work(
    law: PassLaw, passes: PassSequence, waited: Flags, gpu_s: Floats, seen: Flags
) -> PassLaw:
    """Return the law with the GPU's times from passes that did not wait for a launch: of decodes
    alone, and of chunks that are long enough for arithmetic to limit them.
    """
    shows = ~waited & ~passes.idle & seen & (gpu_s > GPU_MIN_S)
    alone = ["pass_read", "token_alone", "cached_alone", *["expert_read"] * (law.experts > 0)]
    mixed = ["token_arithmetic", "attended", "cached_beside"]
    long = passes.mixed & (passes.columns(["token_arithmetic"])[:, 0] > SHORT_TOKENS)
    for terms, own in ((alone, ~passes.mixed), (mixed, long)):
        columns = passes.columns(terms)
        law = _with(law, terms, shows & own, columns, gpu_s, passes.root_weight)
    return law


def _with(
    law: PassLaw,
    terms: Sequence[str],
    its: Flags,
    columns: Floats,
    seconds: Floats,
    root_weight: Floats,
) -> PassLaw:
    """The law with other seconds for `terms`, one for each of the `columns` [n, k], from the passes
    `its` [n], by `solve_passes`; as it is where these are too few.
    """
    if its.sum() < SHOWN_MIN:
        return law
    values = solve_passes(columns[its], seconds[its], root_weight[its], below=TYPICAL_MAX)
    return law.with_terms(dict(zip(terms, values.tolist(), strict=True)))


def graphs_of(measured: StepsProfile) -> GraphSettings | None:
    """How the server launched its passes; None where they did not overlap, or where the profile is
    of a version that did not record it.
    """
    if not (
        measured.async_scheduling
        and measured.graph_mode
        and any(point.idle for point in measured.points)
    ):
        return None
    return GraphSettings(
        measured.graph_mode, tuple(sorted(measured.graph_sizes)), apart=measured.executor != "uni"
    )


def fit_pipeline(passes: PassSequence, seed: int) -> PassLaw:
    """Return the law of a profile's passes, with its held-out error and the spread of launches."""
    law = fit_law(passes, np.ones(len(passes.seconds), dtype=bool))
    error = percent_error(held_out_s(passes, seed), of_points(passes, passes.seconds))
    return replace(law, error=error, spread=_spread(passes, law))


def of_points(passes: PassSequence, values: Floats) -> Floats:
    """Return the mean of each point's passes [points]."""
    return np.bincount(passes.point, values) / np.bincount(passes.point)


def held_out_s(passes: PassSequence, seed: int) -> Floats:
    """Return the seconds of a pass of each point [points], by a law that did not see a fifth of the
    points, this one among them.
    """
    predicted = np.empty(len(passes.seconds))
    part = np.random.default_rng(seed).permutation(passes.point[-1] + 1) % HELD_OUT_PARTS
    for number in range(HELD_OUT_PARTS):
        unseen = part[passes.point] == number
        by_law, _, _ = timeline(passes, fit_law(passes, ~unseen), measured=False)
        predicted[unseen] = by_law[unseen]
    return of_points(passes, predicted)


def _spread(passes: PassSequence, law: PassLaw) -> tuple[float, ...]:
    """Quantiles of launches other than graphs over the law, their mean 1, in an order in which
    neighbours differ; empty where too few are known.
    """
    _, waited, _ = timeline(passes, law, measured=True)
    of, seconds, _ = _shown_launches(passes, waited, np.ones(len(passes.seconds), dtype=bool))
    other = passes.launch[of] != GRAPH
    ratios = seconds[other] / passes.launch_s(law)[of[other]]
    if len(ratios) < QUANTILES:
        return ()
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = np.quantile(np.minimum(ratios, TYPICAL_MAX), shares)
    quantiles = quantiles / quantiles.mean()
    order = [int(f"{k:04b}"[::-1], 2) for k in range(QUANTILES)]
    return tuple(float(quantiles[k]) for k in order)
