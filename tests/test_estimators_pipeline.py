"""The law of passes that overlap, and its fit from profiles of servers with known times."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from overlapping_server import chunk, decodes, ends_of, grid, profile_of

from toolkit.errors import InputError
from toolkit.estimators import pipeline_fit
from toolkit.estimators.laws import RoundsByPass
from toolkit.estimators.part_fits import fit_steps
from toolkit.files.fit import StepsFit
from toolkit.files.profile import StepsProfile
from toolkit.laws.features import EAGER, GRAPH, PIECEWISE, StepShape
from toolkit.laws.passes import GraphSettings, PassLaw

SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
FULL = GraphSettings("FULL_DECODE_ONLY", SIZES)
LAW = PassLaw(
    {
        "pass_read": 5e-3,
        "token_alone": 1e-5,
        "cached_alone": 3.2e-8,
        "token_arithmetic": 2.3e-5,
        "attended": 2e-9,
        "cached_beside": 5e-8,
        "graph": 3e-3,
        "graph_row": 3e-5,
        "piece": 0.0,
        "piece_row": 0.0,
        "eager": 2.5e-2,
        "eager_chunk": 4e-4,
    },
    graphs=FULL,
)
PIECES = {"piece": 4e-3, "piece_row": 2e-5}
DEFAULT = replace(
    LAW.with_terms(PIECES | {"eager": 6e-3}), graphs=GraphSettings("FULL_AND_PIECEWISE", SIZES)
)
NO_GRAPHS = replace(LAW, graphs=GraphSettings("NONE", ()))
APART = replace(DEFAULT, graphs=replace(DEFAULT.graphs, apart=True))


@pytest.mark.parametrize(
    ("mode", "alone", "mixed"),
    [
        ("NONE", EAGER, EAGER),
        ("PIECEWISE", PIECEWISE, PIECEWISE),
        ("FULL", GRAPH, GRAPH),
        ("FULL_DECODE_ONLY", GRAPH, EAGER),
        ("FULL_AND_PIECEWISE", GRAPH, PIECEWISE),
    ],
)
def test_the_mode_says_how_a_pass_is_launched(mode, alone, mixed):
    graphs = GraphSettings(mode, SIZES)
    assert graphs.launch_of(StepShape(512, 0)) == alone
    assert graphs.launch_of(StepShape(12, 0, 1, 500)) == mixed
    assert graphs.launch_of(StepShape(513, 0)) == EAGER
    assert graphs.launch_of(StepShape(13, 0, 1, 500)) == EAGER


def test_a_mode_that_is_not_modelled_is_refused():
    with pytest.raises(InputError, match="FULL_AND_MORE"):
        GraphSettings("FULL_AND_MORE", SIZES)


def test_a_graph_computes_its_own_number_of_rows():
    assert LAW.gpu_s(StepShape(9, 0)) == LAW.gpu_s(StepShape(16, 0))
    assert LAW.gpu_s(StepShape(16, 0)) < LAW.gpu_s(StepShape(17, 0))
    assert LAW.gpu_s(StepShape(600, 0)) < LAW.gpu_s(StepShape(601, 0))


def test_a_pass_alone_waits_for_its_launch_and_then_for_the_gpu():
    alone = StepShape(8, 800)
    assert LAW.forward_s(alone) == pytest.approx(LAW.launch_s(alone) + LAW.gpu_s(alone))
    assert LAW.step_s(alone) == LAW.gpu_s(alone)
    short = chunk(64)
    assert LAW.forward_s(short) == LAW.launch_s(short)
    long = chunk(4096)
    assert LAW.forward_s(long) == LAW.gpu_s(long)


@pytest.mark.parametrize("law", [LAW, DEFAULT, APART, NO_GRAPHS])
def test_the_recursion_is_what_the_loop_does(law):
    measured = profile_of(law, grid(SIZES), stamps=False)
    passes = pipeline_fit.PassSequence.of(measured, law.graphs)
    took_s, _, _ = pipeline_fit.timeline(passes, law, measured=False)
    assert took_s == pytest.approx(passes.seconds, abs=2e-6)


@cache
def fitted(law: PassLaw, *, stamps: bool, cv: float = 0.0) -> tuple[StepsProfile, StepsFit]:
    """A profile of passes by the law, and its fit."""
    measured = profile_of(law, grid(SIZES), stamps=stamps, cv=cv)
    return measured, fit_steps(measured, 0)


def close(found: PassLaw, law: PassLaw, names: tuple[str, ...]) -> None:
    for name in names:
        share = 0.1 if name in ("attended", "cached_beside") else 0.03  # the least of it
        assert found.terms[name] == pytest.approx(law.terms[name], rel=share), name


WORK = ("pass_read", "token_alone", "cached_alone", "token_arithmetic", "attended")
WORK = (*WORK, "cached_beside")


@pytest.mark.slow
@pytest.mark.parametrize(("law", "cv"), [(LAW, 0.2), (DEFAULT, 0.0)])
def test_launch_times_lead_to_the_law(law, cv):
    _, fit = fitted(law, stamps=True, cv=cv)
    found = fit.law
    names = (*WORK, "graph", "graph_row")
    close(found, law, names if cv else (*names, "eager"))
    assert fit.launches == "measured"
    if law is DEFAULT:
        close(found, law, ("piece",))
    else:
        assert found.terms["piece"] == 0.0, "launches of a mode that never ran cost nothing"


@pytest.mark.slow
def test_ends_alone_lead_to_the_law_where_launches_are_steady():
    measured, fit = fitted(LAW, stamps=False)
    found = fit.law
    close(found, LAW, (*WORK, "graph", "eager"))
    assert fit.launches == "inferred"
    assert fit.error.median_percent < 1.0
    older = measured.model_copy(update={"graph_mode": "", "graph_sizes": []})
    assert fit_steps(older, 0).law.graphs is None, "without launch facts the law is of ends"


@pytest.mark.slow
def test_launches_of_other_processes_do_not_hold_tokens_back():
    _, fit = fitted(APART, stamps=False)
    assert fit.law.apart
    close(fit.law, APART, ("pass_read", "cached_alone", "token_arithmetic", "cached_beside"))


@pytest.mark.slow
def test_the_spread_of_launches_keeps_their_mean():
    _, fit = fitted(LAW, stamps=True, cv=0.2)
    assert np.mean(fit.law.spread) == pytest.approx(1.0)
    assert max(fit.law.spread) > 1.1
    law = fit.law
    drawn = [law.drawn_launch_s(chunk(64), number) for number in range(16)]
    assert np.mean(drawn) == pytest.approx(law.launch_s(chunk(64)))
    graph = StepShape(8, 100)
    assert law.drawn_launch_s(graph, 3) == law.launch_s(graph)


@pytest.mark.parametrize("tokens", [64, 512, 1024, 4096, 8064])
def test_policies_believe_what_a_chunk_costs_decodes(tokens):
    """Both gaps around the chunk, less the step that one of them would have been anyway."""
    run = [*decodes(8, 500, 4), chunk(tokens, 8, 504), *decodes(8, 505, 4)]
    ends = [end for _, end in ends_of(LAW, run, [LAW.launch_s(shape) for shape in run])]
    lost_s = ends[4] - ends[2]
    step_s = ends[2] - ends[1]
    believed = RoundsByPass(LAW)
    assert believed.prefill_s(1, tokens) == pytest.approx(lost_s - step_s, rel=0.05)


ONE_BY_ONE = PassLaw(
    {"pass": 5e-3, "row": 1e-5, "cached": 3e-8, "host": 1e-3, "host_row": 1e-6}, (2e-5,), (0,)
)


@pytest.mark.parametrize("rows", [1, 64, 200])
@pytest.mark.parametrize("law", [LAW, ONE_BY_ONE])
def test_steps_take_what_their_passes_take_one_after_another(law, rows):
    believed = RoundsByPass(law)
    each = [law.step_s(StepShape(rows, rows * (300 + k))) for k in range(1, 401)]
    assert believed.decode_s(rows, 300, 400) == pytest.approx(sum(each), rel=2e-4)
    assert believed.decode_s(rows, 300, 1) == pytest.approx(each[0])
    assert believed.decode_s(rows, 300, 0) == 0.0
