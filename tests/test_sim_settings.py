"""Settings of worlds are separated from parameters of policies and checked; the token-step world
runs from the command alone.
"""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import samples
from commands import llmctl
from said import says

from toolkit.cli.runs import result_notes
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.laws.passes import PassRange
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.policies.parameters import declared
from toolkit.sched.view import Decision
from toolkit.sim.api import simulate
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.world import (
    World,
    WorldSettings,
    assign_settings,
    make_world,
    policy_for,
)
from toolkit.traces.generate import Lengths, backlog
from toolkit.traces.types import Trace
from toolkit.traces.write import write_trace


def trace_of(prompts: list[int], outputs: list[int]) -> Trace:
    return Trace(
        np.zeros(len(prompts)),
        np.array(prompts),
        np.array(outputs),
        np.zeros(len(prompts), np.int64),
    )


@pytest.fixture
def fit_file(tmp_path: Path) -> Path:
    write_file(samples.fit(), tmp_path / "fit.json")
    return tmp_path / "fit.json"


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_has_a_parameter_named_like_the_worlds(policy: str) -> None:
    assert not {f.name for f in fields(WorldSettings)} & declared(POLICIES[policy]).keys()


def test_settings_and_parameters_are_separated() -> None:
    given = {"capacity_tokens": 9, "interval_steps": 2, "aggressive.watermark": 0.5}
    of_world, of_policy = assign_settings(["past-future", "aggressive", "slice"], given)
    assert of_world == {"capacity_tokens": 9}
    assert of_policy["past-future"] == {"interval_steps": 2}
    assert of_policy["aggressive"] == {"interval_steps": 2, "watermark": 0.5}
    assert of_policy["slice"] == {}


@pytest.mark.parametrize(
    ("key", "named", "hint"),
    [
        ("watermark", "'watermark'", ""),
        ("capacity_token", "'capacity_token'", "'capacity_tokens'"),
        ("aggressive.watermark", "'aggressive'", "past-future"),
    ],
)
def test_an_unknown_setting_is_refused(key: str, named: str, hint: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        assign_settings(["past-future"], {key: 1})
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("capacity_tokens", -1), ("memory", "virtual"), ("capacity_tokens", 1.5), ("drain", 1)],
)
def test_an_impossible_setting_is_named(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{name}.*{value}"):
        make_world(None, {name: value})


def test_the_token_step_world_has_the_artifact_s_defaults() -> None:
    assert policy_for(None, "past-future", {}).initial_count == 500
    assert not policy_for(None, "past-future", {"overfill": False}).overfill
    assert not policy_for(samples.fit(), "past-future", {}).overfill


def test_a_capacity_set_over_a_fit_holds_for_policy_and_edge() -> None:
    world = make_world(samples.fit(capacity_tokens=8192, zeta_std=1e-9), {"capacity_tokens": 1000})
    assert world.memory.usable_tokens == 900
    assert world.runs_out is not None
    assert world.runs_out(0, 2, 400, 100)


@pytest.mark.slow
def test_simulate_alone_gives_a_row_of_table_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "D3.jsonl"
    lengths = "--prompt uniform:2048:4096 --output uniform:32:4096"
    generate = f"trace generate --out {trace} --backlog 300 {lengths}"
    assert llmctl(*generate.split()) == 0
    capsys.readouterr()
    setting = "--set capacity_tokens=120000 --policies past-future --set reserve=0.1"
    words = f"simulate unit-step --trace {trace} {setting} --json"
    assert llmctl(*words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    in_python = backlog(300, Lengths("uniform", 2048, 4096), Lengths("uniform", 32, 4096), seed=0)
    policy = policy_for(None, "past-future", {"reserve": 0.1})
    expected = simulate(in_python, policy, make_world(None, {})).metrics({})
    said = found.pop("trace")
    assert (said["source"], said["requests"], said["scaling"]) == ("D3.jsonl", 300, None)
    assert {name: found[name] for name in expected} == expected
    assert 80 < found["consumed_memory_percent"] < found["future_required_memory_percent"] < 92
    assert found["unfinished"] == found["failed"] > 0


def test_a_static_batch_holds_its_padding() -> None:
    world = make_world(samples.fit(capacity_tokens=1000, zeta_std=0.0), {}, workers=1)
    counters = simulate(trace_of([100, 60], [3, 2]), make_policy("sequence", {}), world).counters
    assert counters["decoding_steps"] == 3
    assert counters["consumed_memory_percent"] == pytest.approx(
        100 * 2 * (101 + 102 + 103) / 3 / 900
    )
    assert counters["future_required_memory_percent"] == pytest.approx(100 * 2 * 103 / 900)


@pytest.mark.parametrize("policy", POLICIES)
def test_batches_outside_the_fit_are_counted(policy: str) -> None:
    world = replace(
        make_world(samples.fit(), {}, workers=1),
        prefill_range=PassRange(rows_max=8, length_max=100),
        decode_range=PassRange(rows_max=8, length_max=300),
    )
    for prompt, output, outside in [(90, 20, False), (101, 20, True), (90, 240, True)]:
        counters = simulate(trace_of([prompt], [output]), make_policy(policy, {}), world).counters
        assert (counters["extrapolated_batches_percent"] > 0) == outside


def test_requests_that_were_rejected_and_extrapolated_are_counted() -> None:
    policy = make_policy("slice", {})
    world = make_world(samples.fit(), {}, max_new_tokens=256)
    result = simulate(trace_of([600, 9000, 20], [10, 10, 10]), policy, world)
    metrics = result.metrics({})
    assert says(" ".join(result_notes(result.refusals, metrics)), "1 request", "number 2")
    assert metrics["extrapolated_batches_percent"] == 100.0


def test_a_capacity_below_the_longest_prompt_is_one_line(
    fit_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace_of([500, 20], [10, 10]), trace)
    recipe = tmp_path / "recipe.yaml"
    samples.write_recipe(recipe, samples.fit())
    own = (recipe, "--fit", tmp_path / "fit.json")
    for words, capacity, longest in ((own, 100, 256), (("unit-step",), 400, 500)):
        setting = f"capacity_tokens={capacity}"
        assert llmctl("simulate", *map(str, words), "--trace", trace, "--set", setting) == 2
        *_, line, hint = capsys.readouterr().err.splitlines()
        assert says(line, "capacity_tokens", f"{capacity}", f"{longest}")
        assert hint.startswith("hint: ")


def test_a_stalled_simulation_names_its_state() -> None:
    class Idle(Policy):
        name = "idle"
        continuous = False

        def plan(self, view, now_s):
            return Decision()

    world: World = make_world(samples.fit(), {})
    with pytest.raises(SimulationStalledError, match=r"2 of 2.*2 wait.*0 run"):
        simulate(trace_of([5, 6], [7, 8]), Idle(), world)


@pytest.mark.parametrize(
    ("memory", "joining"), [("paged", None), ("slab", "embed"), ("slab-shaped", "shape")]
)
def test_a_world_may_have_another_memory_than_its_engine(memory: str, joining: str | None) -> None:
    assert make_world(None, {"memory": memory}).joining == joining
    facts = samples.fit().engine.model_copy(update={"joining": "embed"})
    fit = samples.fit().model_copy(update={"engine": facts})
    assert make_world(fit, {"memory": memory}).joining == joining
    assert make_world(fit, {}).joining == "embed"
