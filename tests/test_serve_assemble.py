"""Building a scheduler and settings from a plan."""

import pytest
import samples
from said import says

from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts
from toolkit.files.tuning import Settings
from toolkit.sched import kernels
from toolkit.server.engine import make_scheduler, warm_up
from toolkit.sim.world import world_from_fit


def plan(policy: str, engine: str = "transformers", **changes: object) -> Plan:
    recipe = samples.recipe(engine={"name": engine} | changes)
    made = samples.plan(recipe, samples.fit(), "slice", workers=2)
    return made.model_copy(update={"settings": Settings(policy=policy, parameters={})})


@pytest.mark.parametrize(
    ("policy", "engine"),
    [
        *((policy, "rebatch") for policy in ("past-future", "mlfq", "slice")),
        *((policy, "transformers") for policy in ("slice", "sequence")),
    ],
)
def test_an_engine_serves_the_policies_that_it_can_run(policy: str, engine: str) -> None:
    assert make_scheduler(plan(policy, engine)).policy.name == policy


@pytest.mark.parametrize(
    ("engine", "said", "joining"),
    [("fake", {}, None), ("rebatch", {}, "embed"), ("rebatch", {"joining": "shape"}, "shape")],
)
def test_simulator_and_server_take_row_memory_from_the_engine(
    engine: str, said: dict[str, str], joining: str
) -> None:
    facts = samples.fit().engine.model_dump(exclude={"joining"}) | {"engine": engine} | said
    fit = samples.fit().model_copy(update={"engine": EngineFacts(**facts)})
    planned = plan("past-future", "rebatch").model_copy(update={"fit": fit})
    assert [worker.joining for worker in make_scheduler(planned).workers] == [joining] * 2
    assert world_from_fit(fit, workers=1, max_new_tokens=9).scheduled()[0].joining == joining


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("past-future", ("'past-future'", "'transformers'")),
        ("past-future-oracle", ("'past-future-oracle'",)),
    ],
)
def test_plans_that_no_server_can_run_are_refused_by_name(
    policy: str, named: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        make_scheduler(plan(policy))
    assert says(caught.value.message, *named)


def test_the_warm_up_runs_the_kernel_that_batches_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes 0.3 s, in which the first requests of a server would wait."""
    kernel = kernels.split_by_serving_time
    pools = []

    def counted(*arguments: object) -> object:
        pools.append(len(arguments[0]))  # type: ignore[arg-type]
        return kernel(*arguments)

    monkeypatch.setattr(kernels, "split_by_serving_time", counted)
    warm_up(plan("slice"))
    assert pools
    assert max(pools) > 1
