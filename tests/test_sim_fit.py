"""A fitted world serves every policy: the memory edge of static batches is not for rounds."""

import numpy as np
import pytest
import samples

from toolkit.estimators.laws import LinearLaw
from toolkit.estimators.load import laws_from_fit
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sim.api import simulate
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Trace


@pytest.mark.parametrize("policy", POLICIES)
def test_no_request_is_refused_in_a_fitted_world(policy: str) -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 300, 200)
    outputs = rng.integers(1, 128, 200)
    burst = Trace(np.zeros(200), prompts, outputs, np.zeros(200, np.int64))
    world = world_from_fit(samples.fit(zeta_std=0.05), workers=2, max_new_tokens=128)
    result = simulate(burst, make_policy(policy, {}), world)
    assert result.counters["refused"] == 0
    assert result.served.ok.all()


def test_a_server_elsewhere_has_paged_memory_and_a_row_limit():
    fit = samples.fit()
    served = fit.model_copy(
        update={"engine": fit.engine.model_copy(update={"engine": "openai", "max_rows": 3})}
    )
    policy = make_policy("aggressive", {})
    world = world_from_fit(served, workers=1, max_new_tokens=64).under(policy)
    assert not world.latency.padded
    assert world.scheduled()[0].slots == 3
    trace = Trace(np.zeros(9), np.full(9, 8), np.full(9, 16), np.zeros(9, int))
    metrics = simulate(trace, policy, world).metrics({})
    assert metrics["batch_size_mean"] == 3.0


def test_the_laws_of_a_server_elsewhere_include_http_already():
    fit = samples.fit()
    slices = fit.overhead.model_copy(
        update={"batch_s": 1.0, "stretch": 1.5}
    )  # what whole slices take besides the laws
    served = fit.model_copy(
        update={
            "engine": fit.engine.model_copy(update={"engine": "openai"}),
            "overhead": slices,
            "rounds": None,
        }
    )
    world = world_from_fit(served, workers=1, max_new_tokens=64)
    law = world.under(make_policy("aggressive", {})).latency
    assert law.prefill_s(1, 64) < 1.0 < world.latency.prefill_s(1, 64)
    assert law.decode_s(4, 64, 8) == pytest.approx(world.latency.decode_s(4, 64, 8) / 1.5)


def test_only_clients_of_a_server_elsewhere_wait_for_http():
    fit = samples.fit()
    slower = fit.prefill.law.with_terms({"pass": fit.prefill.law.terms["pass"] + 0.5})
    prefill = fit.prefill.model_copy(update={"law": slower})
    engine = fit.engine.model_copy(update={"engine": "openai"})
    served = fit.model_copy(update={"engine": engine, "prefill": prefill})
    world = world_from_fit(served, workers=1, max_new_tokens=64).under(
        make_policy("aggressive", {})
    )
    law = LinearLaw(served.prefill.law, served.decode.law, served.engine.prefill_emits_token)
    step_s = law.decode_s(1, 0.0, 1)
    assert world.front_s == pytest.approx(law.prefill_s(1, 0.0) - step_s)
    assert world.front_s > 0.4
    assert world.latency.prefill_s(1, 0.0) == pytest.approx(step_s), (
        "a prompt's pass takes what a step does"
    )
    assert world.latency.prefill_s(1, 32) + world.front_s == pytest.approx(law.prefill_s(1, 32))
    assert world_from_fit(served, workers=1, max_new_tokens=64).front_s == 0.0, (
        "whole slices have it in them"
    )


def test_laws_of_timed_passes_have_no_front_in_them():
    """A prompt that is computed inside vLLM delays rows that decode by all of its pass."""
    fit = samples.paged_fit()
    assert fit.steps is not None
    laws = laws_from_fit(fit)
    engine = LinearLaw(fit.prefill.law, fit.decode.law, prefill_emits_token=True)
    assert laws.rounds.prefill_s(1, 64) == engine.prefill_s(1, 64)
    assert laws.front_s == fit.steps.front_s
