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

from toolkit.estimators import forms
from toolkit.estimators.forms import Floats
from toolkit.files.profile import StepPoint, StepsProfile
from toolkit.laws.features import (
    ALONE,
    ARITHMETIC,
    CACHED,
    CHUNKS,
    EAGER,
    EXPERTS,
    FEATURES,
    GRAPH,
    LEAST,
    MIXED,
    NUMBERS,
    PIECEWISE,
    ROWS,
    TOKENS,
    StepShape,
    number_of,
    touched_experts,
)
from toolkit.laws.passes import GraphSettings, PassLaw, overlapped

Flags = NDArray[np.bool_]

ROUNDS = 8  # of the alternation; it changes nothing after five or six
SHOWN_MIN = 6  # passes that a group of coefficients is fitted from, at least
SHORT_TOKENS = 512  # a pass with chunks of more tokens is limited by arithmetic
SHARE_SHOWN = 0.5  # of the short passes with chunks that must show their work on the GPU
GPU_MIN_S = 1e-4  # a shorter rest between two ends says nothing of the GPU
QUANTILES = 16  # of the eager launches' spread

LAUNCH_TERMS = (
    (GRAPH, ("graph", "graph_row")),
    (PIECEWISE, ("piece", "piece_row")),
    (EAGER, ("eager", "eager_chunk")),
)

# Where the alternation begins. Any guess of this order of magnitude leads to the same law.
FIRST_GUESS = {
    "pass_alone": 5e-3,
    "token_alone": 1e-5,
    "cached_alone": 3e-8,
    "pass_least": 5e-3,
    "token_least": 0.0,
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
EXPERTS_GUESS = {"expert_alone": 0.0, "expert_least": 0.0}


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
class PassColumns:
    """The passes of a profile in order, as columns [n].

    Attributes:
        numbers: of each pass, [k, n] in the order of `NUMBERS`; tokens are padded where a graph
            computes them.
        seconds: from the end of the pass before (from idle: from scheduling) to the pass's tokens.
        launches: seconds of its launch; 0: not known.
        launch: GRAPH, PIECEWISE or EAGER.
        idle: no pass was under way when it was scheduled.
        point: the number of its point.
        root_weight: the square root of its weight.
        experts: of a layer, and of a token; 0: there are none.
    """

    graphs: GraphSettings
    numbers: Floats
    seconds: Floats
    launches: Floats
    launch: NDArray[np.int_]
    idle: Flags
    point: NDArray[np.int_]
    root_weight: Floats
    experts: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls, points: Sequence[StepPoint], graphs: GraphSettings, experts: tuple[int, int] = (0, 0)
    ) -> PassColumns:
        """The passes of the points, in order, of a model with `experts` of a layer and a token."""
        counts = np.array([len(point.seconds) for point in points])
        number = np.repeat(np.arange(len(points)), counts)
        place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
        launch = []
        of_points = []
        for shape in map(shape_of, points):
            how = graphs.launch_of(shape)
            tokens = shape.tokens if how == EAGER else graphs.padded(shape.tokens)
            touched = touched_experts(shape.tokens, *experts) if experts[0] else 0.0
            launch.append(how)
            of_points.append([number_of(k, shape, tokens, touched) for k in range(len(NUMBERS))])
        numbers = np.array(of_points)[number].T
        # A point of decodes has the mean of its passes.
        from_mean = np.where(numbers[CHUNKS] > 0, 0.0, place - (counts[number] - 1) / 2)
        cached = np.array([point.decode_cached for point in points])[number]
        numbers[CACHED] = cached + from_mean * (numbers[ROWS] - numbers[CHUNKS])
        idle = (place == 0) & np.array([point.idle for point in points])[number]
        idle[0] = True
        weights = [min(count, forms.SAMPLES_COUNTED_MAX) / count for count in counts.tolist()]
        unknown = [[0.0] * count for count in counts.tolist()]
        known = [one.launch_s or none for one, none in zip(points, unknown, strict=True)]
        return cls(
            graphs=graphs,
            numbers=numbers,
            seconds=np.concatenate([point.seconds for point in points]),
            launches=np.concatenate(known),
            launch=np.array(launch)[number],
            idle=idle,
            point=number,
            root_weight=np.array([weight**0.5 for weight in weights])[number],
            experts=experts,
        )

    def __len__(self) -> int:
        return len(self.seconds)

    def columns(self, terms: Sequence[str]) -> Floats:
        """Return what each of the terms counts in each pass [n, k]."""
        return np.stack([self.numbers[FEATURES[term].number] for term in terms], axis=1)

    def part_s(self, law: PassLaw, part: int) -> Floats:
        """Return the seconds of the terms of one part [n], as if it applied to all passes."""
        own = [term for term in law.terms if part in FEATURES[term].parts]
        seconds: Floats = self.columns(own) @ np.array([law.terms[term] for term in own])
        return seconds

    def work_s(self, law: PassLaw) -> Floats:
        """Return the seconds of each pass on the GPU."""
        mixed = np.maximum(self.part_s(law, LEAST), self.part_s(law, ARITHMETIC))
        mixed = mixed + self.part_s(law, MIXED)
        return np.where(self.numbers[CHUNKS] > 0, mixed, self.part_s(law, ALONE))

    def launch_s(self, law: PassLaw) -> Floats:
        """Return the seconds of each launch by the law."""
        graph, piece, eager = (self.part_s(law, part) for part, _ in LAUNCH_TERMS)
        return np.select([self.launch == GRAPH, self.launch == PIECEWISE], [graph, piece], eager)


@dataclass(frozen=True, slots=True)
class PassTimeline:
    """How the passes follow one another by a law, columns [n].

    Attributes:
        took_s: seconds from the tokens of the pass before (from idle: from its scheduling) to its
            tokens, by the law.
        for_launch: it ended with the launch of the next pass.
        gpu_s: seconds from when the GPU could begin the pass to its end.
    """

    took_s: Floats
    for_launch: Flags
    gpu_s: Floats


def timeline(passes: PassColumns, law: PassLaw, *, measured: bool) -> PassTimeline:
    """The recursion of `toolkit.laws.passes` over all runs, each from idle.

    With `measured`, each pass follows the measured ends and launches of the passes before it, which
    says what it waited for. Without, nothing measured comes in but the passes' compositions.
    """
    count = len(passes)
    apart = law.apart
    launch_s = passes.launch_s(law)
    if measured:
        launch_s = np.where(passes.launches > 0.0, passes.launches, launch_s)
    launch = launch_s.tolist()
    work = passes.work_s(law).tolist()
    graph = (passes.launch == GRAPH).tolist()
    idle = passes.idle.tolist()
    seconds = passes.seconds.tolist()
    took_s = np.zeros(count)
    for_launch = np.zeros(count, dtype=bool)
    gpu_s = np.zeros(count)
    launched_s = 0.0  # of the pass before: the end of its launch
    done_s = 0.0  # its end on the GPU
    end_s = 0.0  # its tokens
    before_s = 0.0  # the tokens of the pass before that one
    for k in range(count):
        if idle[k]:
            scheduled_s = 0.0
            launched_s = 0.0
            done_s = 0.0
            end_s = 0.0
        elif idle[k - 1]:
            scheduled_s = 0.0 if apart else launched_s
        else:
            scheduled_s = before_s
        launched_s, gpu_begins_s, done_s = overlapped(
            scheduled_s, launched_s, done_s, launch[k], work[k], waits=graph[k], apart=apart
        )
        tokens_s = done_s
        if k + 1 < count and not idle[k + 1] and not apart:
            next_s = launched_s if idle[k] else end_s
            tokens_s = max(done_s, next_s + launch[k + 1])
        took_s[k] = tokens_s - end_s
        for_launch[k] = tokens_s > done_s
        before_s = end_s
        end_s = end_s + seconds[k] if measured else tokens_s
        gpu_s[k] = end_s - gpu_begins_s
        if measured:
            done_s = min(done_s, end_s) if for_launch[k] else end_s
    return PassTimeline(took_s, for_launch, gpu_s)


def fit_law(passes: PassColumns, seen: Flags | None = None) -> PassLaw:
    """Return the law that the passes show, of which the fit may use those that are `seen` [n].

    The coefficients of launches that no pass had are 0. Without launch times in the profile,
    launches that no pass waited for stay as guessed: shorter than what hid them.
    """
    chosen = np.ones(len(passes), dtype=bool) if seen is None else seen
    experts, per_token = passes.experts
    guess = FIRST_GUESS | (EXPERTS_GUESS if experts else {})
    law = PassLaw(guess, experts=experts, experts_per_token=per_token, graphs=passes.graphs)
    for _ in range(ROUNDS):
        found = timeline(passes, law, measured=True)
        law = _with_launches(law, passes, found, chosen)
        law = _with_work(law, passes, found, chosen)
    for launch, terms in LAUNCH_TERMS:
        if not (passes.launch == launch).any():
            law = law.with_terms(dict.fromkeys(terms, 0.0))
    return law


def _with_launches(law: PassLaw, passes: PassColumns, found: PassTimeline, seen: Flags) -> PassLaw:
    """The law with the launches that passes show."""
    of, seconds, root_weight = _shown_launches(passes, found, seen)
    for launch, terms in LAUNCH_TERMS:
        columns = passes.columns(terms)[of]
        law = _with(law, terms, passes.launch[of] == launch, columns, seconds, root_weight)
    return law


def _shown_launches(
    passes: PassColumns, found: PassTimeline, seen: Flags
) -> tuple[NDArray[np.int_], Floats, Floats]:
    """Launches [k] that are known, or else that a pass waited for: their passes, seconds and roots
    of weights.
    """
    if passes.launches.any():
        of = np.flatnonzero((passes.launches > 0.0) & seen)
        return of, passes.launches[of], passes.root_weight[of]
    shown = np.flatnonzero(found.for_launch & ~passes.idle & seen)
    # Such a pass lasts as long as the launch of the next one.
    return shown + 1, passes.seconds[shown], passes.root_weight[shown]


def _with_work(law: PassLaw, passes: PassColumns, found: PassTimeline, seen: Flags) -> PassLaw:
    """The law with the GPU's times from passes that did not wait for a launch."""
    shows = ~found.for_launch & ~passes.idle & seen & (found.gpu_s > GPU_MIN_S)
    root_weight = passes.root_weight
    mixed = passes.numbers[CHUNKS] > 0
    short = mixed & (passes.numbers[TOKENS] <= SHORT_TOKENS)
    terms = ["pass_alone", "token_alone", "cached_alone"]
    if passes.experts[0]:
        terms.append("expert_alone")
    law = _with(law, terms, shows & ~mixed, passes.columns(terms), found.gpu_s, root_weight)
    if passes.experts[0]:
        law = law.with_terms({"expert_least": law.terms["expert_alone"]})
    terms = ["token_arithmetic", "attended", "cached_beside"]
    its = shows & mixed & ~short
    law = _with(law, terms, its, passes.columns(terms), found.gpu_s, root_weight)
    if (shows & short).sum() < SHARE_SHOWN * (short & seen).sum() + SHOWN_MIN:
        # Launches hide the least time of short passes; it reads the weights, as decodes do.
        return law.with_terms({"pass_least": law.terms["pass_alone"], "token_least": 0.0})
    least_s = passes.part_s(law, LEAST)
    experts_s = law.terms.get("expert_least", 0.0) * passes.numbers[EXPERTS]
    rest_s = found.gpu_s - passes.part_s(law, MIXED) - experts_s
    its = shows & short & (rest_s > GPU_MIN_S) & (least_s >= passes.part_s(law, ARITHMETIC))
    terms = ["pass_least", "token_least"]
    return _with(law, terms, its, passes.columns(terms), rest_s, root_weight)


def _with(
    law: PassLaw,
    terms: Sequence[str],
    its: Flags,
    columns: Floats,
    seconds: Floats,
    root_weight: Floats,
) -> PassLaw:
    """The law with other seconds for `terms`, one for each of the `columns` [n, k], from the passes
    `its` [n], by `forms.solve_passes`; as it is where these are too few.
    """
    if its.sum() < SHOWN_MIN:
        return law
    values = forms.solve_passes(
        columns[its], seconds[its], root_weight[its], below=forms.TYPICAL_MAX
    )
    return law.with_terms(dict(zip(terms, values.tolist(), strict=True)))


def graphs_of(measured: StepsProfile) -> GraphSettings | None:
    """How the server launched its passes; None where they did not overlap, or where the profile is
    of a version that did not record it.
    """
    recorded = measured.graph_mode and any(point.idle for point in measured.points)
    if not measured.async_scheduling or not recorded:
        return None
    return GraphSettings(
        measured.graph_mode, tuple(measured.graph_sizes), apart=measured.executor != "uni"
    )


def fit_pipeline(passes: PassColumns) -> PassLaw:
    """Return the law of a profile's passes, with the spread of its launches."""
    law = fit_law(passes)
    return replace(law, spread=_spread(passes, law))


def held_out_s(passes: PassColumns, seed: int) -> Floats:
    """Seconds of a pass of each point [points], by a law that did not see a fifth of the points,
    this one among them.
    """
    predicted = np.empty(len(passes))
    part = np.random.default_rng(seed).permutation(passes.point[-1] + 1) % forms.HELD_OUT_PARTS
    for number in range(forms.HELD_OUT_PARTS):
        unseen = part[passes.point] == number
        by_law = timeline(passes, fit_law(passes, ~unseen), measured=False)
        predicted[unseen] = by_law.took_s[unseen]
    return np.bincount(passes.point, predicted) / np.bincount(passes.point)


def _spread(passes: PassColumns, law: PassLaw) -> tuple[float, ...]:
    """Quantiles of launches other than graphs over the law, their mean 1, in an order in which
    neighbours differ; empty where too few are known.
    """
    found = timeline(passes, law, measured=True)
    of, seconds, _ = _shown_launches(passes, found, np.ones(len(passes), dtype=bool))
    other = passes.launch[of] != GRAPH
    ratios = seconds[other] / passes.launch_s(law)[of[other]]
    if len(ratios) < QUANTILES:
        return ()
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    quantiles = np.quantile(np.minimum(ratios, forms.TYPICAL_MAX), shares)
    quantiles = quantiles / quantiles.mean()
    bits = QUANTILES.bit_length() - 1
    order = [int(f"{k:0{bits}b}"[::-1], 2) for k in range(QUANTILES)]
    return tuple(float(quantiles[k]) for k in order)
