"""The model of vLLM's scheduler with speculative decoding: against passes of vLLM's own classes,
and what must hold whatever is accepted.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from paged import FLAT, LAW, trace_of, world
from pydantic import ValidationError
from said import says

from toolkit.backends.vllm.conformance.modelled import passes_of_case
from toolkit.errors import InputError
from toolkit.files.iterations import LoggedRow
from toolkit.files.recipe import AcceptanceSpec
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.drafts import DRAWS, DrawnDrafts, drafts_of
from toolkit.sim.paged_engine import PagedEngine

DATA = Path(__file__).parent / "data"
ROWS = [(0.3 * k, 5 + k, 9 + 2 * k % 7, k % 3) for k in range(12)]


@pytest.mark.parametrize("number", range(8))
def test_passes_are_those_of_vllm_s_schedulers(number: int) -> None:
    """As vLLM 0.32.0 planned them, by n-grams and EAGLE, without and with async scheduling."""
    case, theirs = json.loads((DATA / "vllm-0.32.0-drafts.json").read_text())[number]
    assert passes_of_case(case) == theirs


@pytest.mark.parametrize("number", range(5))
def test_a_later_release_keeps_blocks_by_other_rules(number: int) -> None:
    """As vLLM 0.33.0 planned them, three by n-grams and two by EAGLE; by the rules of 0.32 they
    differ.
    """
    case, theirs = json.loads((DATA / "vllm-0.33.0-drafts.json").read_text())[number]
    assert passes_of_case(case) == theirs
    assert passes_of_case(case | {"version": "0.32.0", "hash_lookahead": 0}) != theirs


def engine(rates: tuple[float, ...], law=FLAT, **more) -> PagedEngine:
    """An engine with so many drafts; the law does not price them."""
    return PagedEngine(law, 60, 4, draft_method="ngram", draft_tokens=len(rates), **more)


def run(rates: tuple[float, ...], rows=ROWS, policy: VllmPolicy | None = None, **more):
    flags = policy or VllmPolicy(max_num_batched_tokens=64, max_num_seqs=8)
    flags = replace(flags, num_speculative_tokens=len(rates))
    there = world(engine(rates, **more), acceptance=AcceptanceSpec(rates=list(rates)))
    return simulate(trace_of(rows), flags, there)


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_that_are_never_accepted_leave_all_times_as_they_are(ahead: bool) -> None:
    plain = simulate(
        trace_of(ROWS),
        VllmPolicy(max_num_batched_tokens=64, max_num_seqs=8),
        world(PagedEngine(FLAT, 60, 4, ahead=ahead)),
    )
    drafted = run((0.0, 0.0), ahead=ahead)
    assert drafted.served.finish_s.tolist() == plain.served.finish_s.tolist()
    assert drafted.counters["accepted_tokens"] == 0
    assert drafted.counters["drafted_tokens"] > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_with_all_drafts_accepted_a_request_takes_a_share_of_the_passes(ahead: bool) -> None:
    """13 tokens: one of the prompt's pass, then three of each pass of two drafts. Planned ahead it
    is in one more pass: that it ends with the last one is not sure before.
    """
    result = run((1.0, 1.0), [(0, 6, 13, 0)], ahead=ahead)
    assert result.counters["rounds"] == 5 + ahead
    assert result.counters["accepted_tokens"] == 8
    assert result.served.finish_s[0] - result.served.first_token_s[0] == pytest.approx(4.0)


def test_every_token_has_a_gap_before_it() -> None:
    """Of an accepted draft it is 0: half of the tokens come with another one."""
    result = run((1.0,), [(0, 4, 21, 0)])
    assert result.counters["itl_mean_s"] == pytest.approx(10 / 20)
    assert round(result.counters["itl_p50_s"], 9) in (0.0, 1.0)


def test_where_no_draft_is_proposed_passes_have_none() -> None:
    rows = [(0, 4, 200, 0)]
    flags = VllmPolicy(num_speculative_tokens=2)
    seldom = AcceptanceSpec(rates=[1.0, 1.0], proposed=0.25)
    result = simulate(trace_of(rows), flags, world(engine((1.0, 1.0)), acceptance=seldom))
    assert 0 <= result.counters["drafted_tokens"] - result.counters["accepted_tokens"] <= 2
    assert 110 < result.counters["rounds"] < 170  # half a draft a pass
    assert run((1.0, 1.0), rows).counters["rounds"] < 75


def test_the_same_seed_draws_the_same() -> None:
    one = run((0.7, 0.4), law=LAW).metrics({})
    assert one == run((0.7, 0.4), law=LAW).metrics({})
    drafts = DrawnDrafts("ngram", (0.7, 0.4), seed=3)
    copied = pickle.loads(pickle.dumps(drafts))
    assert [copied.accepted(5, k) for k in range(50)] == [drafts.accepted(5, k) for k in range(50)]


def test_draws_have_the_rates_of_the_positions() -> None:
    drafts = DrawnDrafts("eagle", (0.8, 0.5, 0.1), seed=1)
    drawn = [drafts.accepted(0, k) for k in range(DRAWS // 10)]
    for position, rate in enumerate(drafts.rates):
        assert sum(one > position for one in drawn) / len(drawn) == pytest.approx(rate, abs=0.01)


def test_a_length_of_other_drafts_gives_each_draft_the_same_probability() -> None:
    known = AcceptanceSpec(length=2.5, tokens=3)
    assert drafts_of("ngram", 2, known, 0).rates == drafts_of("ngram", 3, known, 0).rates[:2]


@pytest.mark.parametrize(
    ("acceptance", "words"),
    [
        (None, ["3", "serve.acceptance"]),
        (AcceptanceSpec(rates=[0.5]), ["1", "3"]),
        (AcceptanceSpec(length=4.5), ["4.5", "4"]),
    ],
)
def test_drafts_without_rates_are_refused(acceptance, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        drafts_of("ngram", 3, acceptance, 0)
    assert says(error.value.whole, *words)


@pytest.mark.parametrize("rates", [(0.4, 0.5), (1.1,), (-0.1,)])
def test_rates_that_cannot_be_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        AcceptanceSpec(rates=list(rates))


def test_a_number_of_drafts_without_a_law_is_refused() -> None:
    with pytest.raises(InputError) as error:
        run_with(3)
    assert says(error.value.whole, "3", "2")


def run_with(tokens: int) -> None:
    flags = VllmPolicy(num_speculative_tokens=tokens)
    there = world(engine((0.5, 0.5)), acceptance=AcceptanceSpec(length=2.0))
    simulate(trace_of(ROWS), flags, there)


def test_a_row_with_drafts_decodes_and_one_recomputed_does_not() -> None:
    assert LoggedRow("a", 50, 4, 40, 3).decodes
    assert LoggedRow("a", 50, 1, 40).decodes
    assert not LoggedRow("a", 50, 4, 40).decodes
    assert not LoggedRow("a", 39, 4, 40, 3).decodes
    assert not LoggedRow("a", 50, 1, 60, 0, True).decodes


@pytest.mark.parametrize(
    "given",
    [{}, {"rates": [0.5], "length": 2.0}, {"rates": [0.5, 0.6]}, {"rates": [0.5], "tokens": 1}],
)
def test_an_acceptance_that_contradicts_itself_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        AcceptanceSpec.model_validate(given)
