"""Several replicas of a server: `tune` searches the router before them, and the plan names it."""

from pathlib import Path

import pytest
import samples
from lean import without_capacity
from orders import changed
from said import says

from toolkit.cli.output import show
from toolkit.cli.tune import METRICS
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError
from toolkit.files.io import digest, head
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning
from toolkit.report.sections import tuning_sheet
from toolkit.report.verdict import verdict
from toolkit.routing.routers import ROUTERS
from toolkit.traces.generate import Arrivals, SharedContent, generate, parse_lengths
from toolkit.traces.types import Trace
from toolkit.tuning.executor import InProcessRunner, Runner
from toolkit.tuning.search import search_settings
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

SLA = {"ttft_p90_s": 0.3, "mtpot_p90_s": 1.0}
TUNE = {"trials": 5, "windows": 1, "held_out_windows": 1, "request_rate_rps": 90.0}
POLICY = {"name": "vllm", "parameters": {"max_num_seqs": 32, "max_num_batched_tokens": 512}}


def traffic(shared: bool = True) -> Trace:
    """Short questions to two dozen long templates."""
    content = SharedContent(templates=24, template=parse_lengths("fixed:300"))
    return generate(
        Arrivals(90.0),
        6.0,
        parse_lengths("uniform:10:60"),
        parse_lengths("uniform:5:40"),
        0,
        content if shared else None,
    )


def inputs(sla: dict[str, float] = SLA, *, shared: bool = True, **changes: object) -> TuneInputs:
    spec = {"engine": {"name": "vllm"}, "workers": 3, "policy": POLICY, "tune": TUNE}
    recipe = samples.recipe(sla=sla, **(spec | changes))
    fit = samples.paged_fit(capacity_tokens=4096)
    return TuneInputs(recipe, fit, cut_trace(recipe, fit, traffic(shared)))


@without_capacity()
def found_by(given: TuneInputs, runner: Runner | None = None) -> Tuning:
    return tune(given, runner or InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.fixture(scope="module")
def routed() -> Tuning:
    given = inputs(tune=TUNE | {"routers": ["sglang", "by-law"]})
    return found_by(given)


def test_each_router_is_a_space_with_its_own_parameters_and_the_recipe_s_targets() -> None:
    settings = search_settings(inputs().recipe, samples.paged_fit())
    routers = [space.start.replica_router for space in settings.spaces]
    assert [router.name for router in routers if router] == list(ROUTERS)
    by_law = next(space for space in settings.spaces if space.key == "vllm behind by-law")
    assert "by-law.late" in by_law.distributions
    assert "max_num_seqs" in by_law.distributions
    router = by_law.start.replica_router
    assert router is not None
    assert (router.parameters["ttft_s"], router.parameters["gap_s"]) == (0.3, 1.0)
    settings = by_law.settings({"max_num_seqs": 7, "by-law.late": 2.0})
    assert settings.parameters["max_num_seqs"] == 7
    router = settings.replica_router
    assert router is not None
    assert (router.parameters["late"], router.parameters["ttft_s"]) == (2.0, 0.3)


def test_a_recipe_narrows_the_routers_and_their_parameters() -> None:
    narrowed = TUNE | {"routers": ["llm-d"], "space": {"llm-d.prefix": [1, 2]}}
    settings = search_settings(inputs(tune=narrowed).recipe, samples.paged_fit())
    assert [space.key for space in settings.spaces] == [
        "vllm behind round-robin",
        "vllm behind llm-d",
    ]
    among = settings.spaces[1].distributions["llm-d.prefix"]
    assert (among.low, among.high) == (1.0, 3.0)  # it holds the default


@pytest.mark.parametrize(
    ("changes", "named", "hint"),
    [
        (
            {"tune": TUNE | {"routers": ["bylaw"]}},
            ("tune.routers", "'bylaw'"),
            "'by-law'",
        ),
        (
            {"tune": TUNE | {"space": {"by-law.lat": [0, 1]}}},
            ("tune.space", "'by-law'", "'lat'"),
            "late",
        ),
        ({"replica_router": {"name": "bylaw"}}, ("replica_router", "'bylaw'"), "'by-law'"),
        (
            {"replica_router": {"name": "llm-d", "parameters": {"x": 1}}},
            ("'llm-d'", "'x'"),
            "kv, prefix, queue",
        ),
        ({"policy": {"name": "fcfs"}}, ("'fcfs'", "3 replicas"), "workers"),
    ],
)
def test_wrong_names_get_the_valid_ones(
    changes: dict[str, object], named: tuple[str, ...], hint: str
) -> None:
    with pytest.raises(InputError) as caught:
        search_settings(inputs(**changes).recipe, samples.paged_fit())
    assert says(caught.value.message, *named)
    assert hint in (caught.value.hint or "")


@pytest.mark.slow
def test_the_search_finds_the_router_that_knows_what_is_cached(
    routed: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    best = routed.best.settings
    in_turn = routed.in_turn
    assert best.replica_router is not None
    assert best.replica_router.name in ("sglang", "by-law")
    assert in_turn is not None
    assert in_turn.settings.parameters == best.parameters
    assert routed.best.metrics["hit_percent"] > in_turn.metrics["hit_percent"]
    assert {one.best.settings.replica_router.name for one in routed.policies} == {
        "round-robin",
        "sglang",
        "by-law",
    }
    said = "\n".join(verdict(routed))
    assert says(said, best.replica_router.name, "in turn")
    show(tuning_sheet(routed, METRICS))
    shown = capsys.readouterr().out
    assert says(shown, "router", "round-robin")
    assert max(map(len, shown.splitlines())) <= 80
    assert Tuning.model_validate_json(routed.model_dump_json()) == routed


@pytest.mark.slow
def test_the_plan_has_router_and_replicas_and_explains_them(routed: Tuning, tmp_path: Path) -> None:
    recipe = inputs().recipe
    file = tmp_path / "trace.jsonl"
    file.write_text("")
    found = routed.model_copy(update={"recipe_name": recipe.name})
    one = recipe.model_copy(update={"workers": 1})  # the tuning says how many run
    plan = make_plan(one, samples.paged_fit(), found, {"trace": file})
    assert (plan.workers, plan.recipe.workers) == (3, 3)
    assert plan.settings.replica_router == found.recommended.settings.replica_router
    assert plan.settings.replica_router is not None
    name = plan.settings.replica_router.name
    assert plan.explained["replica_router"].value == name
    assert plan.explained["replica_router"].source.startswith("trial ")
    assert plan.explained["workers"].value == "3"
    if name == "by-law":
        assert plan.explained["by-law.ttft_s"].source == "recipe: sla"
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_neither_replicas_nor_prices_make_a_measurement_stale(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    digests = []
    for workers, price in ((1, None), (4, 2.5)):
        recipe = changed(inputs(workers=workers).recipe, hardware__usd_per_hour=price)
        file.write_text(recipe.model_dump_json())
        digests.append(head({"recipe": file})["inputs"]["recipe"].sections)
    assert digests[0] == digests[1]
    assert digest(file).sha256


@pytest.mark.slow
def test_refusals_by_forecast_are_simulated_and_bounded_where_the_recipe_bounds_them() -> None:
    sla = {"ttft_p90_s": 0.05}
    bounded = TUNE | {"max_refused_percent": 5.0, "routers": ["own"], "trials": 1}
    found = found_by(inputs(sla, tune=bounded))
    refused = found.best.metrics["refused_percent"]
    limit = next(limit for limit in found.limits if limit.name == "refused_percent")
    assert refused > 5.0
    assert (limit.limit, limit.predicted, limit.kept) == (5.0, refused, False)
    for change in ({"tune": TUNE}, {"tune": bounded, "serve": {"admission": "queue"}}):
        given = inputs(sla, **change)
        assert not given.deployment.refuses
