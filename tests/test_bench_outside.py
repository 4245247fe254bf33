"""The speed and the front's delay of a server, read off what clients saw of a warm-up."""

import numpy as np
import pytest
import samples

from toolkit.bench.client import Replay
from toolkit.bench.predict import predicted, seen_by_clients
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.load import Sample
from toolkit.files.plan import Plan
from toolkit.metrics import Served
from toolkit.sim.conditions import ServerConditions
from toolkit.sim.worker import FrontDelay
from toolkit.traces.types import Trace


def plan() -> Plan:
    recipe = samples.recipe(policy={"name": "aggressive"}, engine={"name": "fake"})
    return make_plan(recipe, samples.fit(), None, {})


def busy(count: int = 60, output: int = 12) -> Trace:
    """Requests that meet others."""
    k = np.arange(count)
    return Trace(k * 0.02, 10 + k % 40, np.full(count, output), np.zeros(count, dtype=np.int64))


def as_seen(trace: Trace, served: Served) -> Replay:
    columns = (
        trace.arrival_s,
        trace.prompt_tokens,
        served.first_token_s,
        served.finish_s,
        served.output_tokens,
    )
    seen = [
        Sample(at_s, int(prompt), int(tokens), at_s, first_s, last_s, 0.0, int(tokens), "")
        for at_s, prompt, first_s, last_s, tokens in zip(*columns, strict=True)
    ]
    return Replay(seen, False)


@pytest.mark.parametrize("slowdown", [0.7, 1.0, 1.8])
def test_the_speed_and_the_delay_of_a_server_are_found_again(slowdown: float):
    trace = busy()
    served = predicted(plan(), trace, ServerConditions(slowdown, FrontDelay(0.03, 0.03))).served
    warm = seen_by_clients(plan(), trace, as_seen(trace, served), ())
    assert warm.slowdown == pytest.approx(slowdown, rel=0.03)  # a simulation moves in steps
    assert warm.front.first_s == warm.front.last_s == pytest.approx(0.03, abs=0.005)


def test_failed_requests_show_nothing():
    trace = busy()
    seen = as_seen(trace, predicted(plan(), trace).served)
    for sample in seen.samples[::3]:
        sample.failure = "the connection was lost"
        sample.last_token_s = sample.last_token_s + 9.0
    assert seen_by_clients(plan(), trace, seen, ()).slowdown == pytest.approx(1.0, rel=0.03)


def test_a_fast_server_has_no_negative_delay():
    trace = busy()
    served = predicted(plan(), trace).served
    seen = as_seen(trace, served)
    for sample in seen.samples:
        wait_s = sample.first_token_s - sample.scheduled_s
        sample.first_token_s -= 0.9 * wait_s
        sample.last_token_s -= 0.9 * wait_s
    assert seen_by_clients(plan(), trace, seen, ()).front.first_s == 0.0


def test_single_tokens_show_no_speed():
    trace = busy(output=1)
    assert (
        seen_by_clients(plan(), trace, as_seen(trace, predicted(plan(), trace).served), ()) is None
    )
