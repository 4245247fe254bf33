"""From fleet.yaml to a plan: kinds of workers that are read, refused and written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from commands import llmctl
from orders import changed
from said import says

from toolkit.bench.predict import predicted
from toolkit.cli.basis import open_fleet, plan_from
from toolkit.cli.serve_start import override
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.fleet import is_fleet
from toolkit.files.io import file_text, head, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import RouterSpec
from toolkit.files.shipped import load_recipe
from toolkit.serve.assemble import make_scheduler
from toolkit.sim.conditions import ServerConditions
from toolkit.sim.world import world_of
from toolkit.traces.types import Trace

MODEL = {
    "source": "random",
    "config": {"model_type": "fake"},
    "dtype": "float32",
    "max_model_len": 512,
    "tokenizer": "bytes",
}


def write_kind(
    folder: Path, name: str, capacity: int = 8192, speed: float = 1.0, **changes: object
) -> None:
    """A recipe, and the fit of a machine that is `speed` times as fast as the sample's."""
    recipe = samples.recipe(name=name, model=MODEL | changes.pop("model", {}), **changes)
    write_file(recipe, folder / f"{name}.yaml")  # JSON is YAML
    facts = samples.fit(capacity)
    made = head({"recipe": folder / f"{name}.yaml"})
    fit = changed(facts, recipe_name=name, overhead__stretch=1.1 / speed, **made)
    write_file(fit, folder / f"{name}.fit.json")


def write_fleet(folder: Path, *members: tuple[str, int]) -> Path:
    lines = [
        f"  - {{recipe: {name}.yaml, fit: {name}.fit.json, workers: {count}}}"
        for name, count in members
    ]
    path = folder / "fleet.yaml"
    path.write_text("\n".join(["fleet:", *lines, ""]))
    return path


@pytest.fixture
def unequal(tmp_path: Path) -> Path:
    write_kind(tmp_path, "large", 8192, 4.0)
    write_kind(tmp_path, "small", 1024)
    return write_fleet(tmp_path, ("large", 1), ("small", 2))


def test_a_plan_has_all_kinds_and_both_clocks_the_same_workers(unequal):
    plan, _ = plan_from(unequal, None, None)
    write_file(plan, unequal.with_name("plan.json"))
    again = read_file(Plan, unequal.with_name("plan.json"))
    assert again == plan
    assert [(kind.recipe.name, kind.workers) for kind in again.kinds] == [
        ("large", 1),
        ("small", 2),
    ]
    live = make_scheduler(again).workers
    simulated = world_of(again.kinds, max_new_tokens=128).scheduled()
    assert all(one.is_like(other) for one, other in zip(live, simulated, strict=True))
    assert [worker.capacity_tokens for worker in live] == [7372, 921, 921]
    assert says(plan.explained["workers"].source, "1 of large", "2 of small", "large with 2")
    assert plan.explained["small: capacity_tokens"].value == "1024"


def test_a_fleet_of_one_kind_is_the_plain_plan(tmp_path):
    write_kind(tmp_path, "large", workers=2)
    fleet = open_fleet(write_fleet(tmp_path, ("large", 1), ("large", 1)))
    [kind] = fleet.kinds
    inputs = {"recipe": tmp_path / "large.yaml", "fit": tmp_path / "large.fit.json"}
    plain = make_plan(load_recipe(inputs["recipe"]), kind.fit, None, inputs)
    written = make_plan(kind.recipe, kind.fit, None, inputs, None, fleet.kinds[1:], kind.workers)
    assert file_text(written) == file_text(plain)
    assert "others" not in file_text(plain)


def test_a_fleet_names_the_machines_of_each_kind(unequal):
    text = unequal.read_text().replace(
        "workers: 1}", "workers: 1, nodes: {pool: new, example.com/rack: r7}}"
    )
    unequal.write_text(text)
    plan, _ = plan_from(unequal, None, None)
    write_file(plan, unequal.with_name("plan.json"))
    kinds = read_file(Plan, unequal.with_name("plan.json")).kinds
    assert [kind.nodes for kind in kinds] == [{"pool": "new", "example.com/rack": "r7"}, {}]
    unequal.write_text(text.replace("r7", "'!r7'"))
    with pytest.raises(InputError, match=r"fleet\[0\]\.nodes\.example\.com/rack.*!r7"):
        plan_from(unequal, None, None)


def test_the_first_difference_between_models_is_named(tmp_path):
    write_kind(tmp_path, "large")
    write_kind(tmp_path, "small", model={"seed": 7})
    with pytest.raises(InputError) as caught:
        open_fleet(write_fleet(tmp_path, ("large", 1), ("small", 1)))
    assert says(caught.value.message, "model.seed", "0", "'large'", "7", "'small'")


VLLM = {"name": "vllm", "parameters": {"max_num_seqs": 32, "max_num_batched_tokens": 512}}


def paged(speed: float = 1.0, capacity: int = 4096) -> Fit:
    """The sample's fit of vLLM, on a machine that is `speed` times as fast."""
    plain = samples.paged_fit(capacity)
    assert plain.steps is not None
    names = ("base_s", "row_s", "prefill_s", "cached_s", "attended_s", "host_s")
    times: dict[str, Any] = {name: getattr(plain.steps, name) / speed for name in names}
    times["token_s"] = [each / speed for each in plain.steps.token_s]
    return changed(plain, steps=changed(plain.steps, **times))


def write_server(folder: Path, name: str, speed: float = 1.0, **changes: object) -> None:
    """A recipe of engine vllm, and the fit of a machine that is `speed` times as fast."""
    spec = {"engine": {"name": "vllm"}, "workers": 1, "policy": VLLM} | changes
    write_kind(folder, name, **spec)
    made = head({"recipe": folder / f"{name}.yaml"})
    fit = paged(speed).model_copy(update={"recipe_name": name, **made})
    write_file(fit, folder / f"{name}.fit.json")


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A server, and two that take three times as long."""
    write_server(tmp_path, "fast")
    slow = {"name": "vllm", "parameters": {"max_num_seqs": 8, "max_num_batched_tokens": 256}}
    write_server(tmp_path, "slow", 1 / 3, policy=slow)
    return write_fleet(tmp_path, ("fast", 1), ("slow", 2))


def test_servers_are_a_fleet_with_flags_and_laws_of_their_own(servers):
    kinds = open_fleet(servers).kinds
    world = world_of(kinds, max_new_tokens=64)
    assert world.size == 3
    assert [kind.flags and kind.flags.max_num_seqs for kind in world.kinds] == [None, 8]
    fast, slow = (kind.engine().steps for kind in world.kinds)
    assert slow.base_s == pytest.approx(3 * fast.base_s)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"engine": {"name": "transformers"}}, ("'fast'", "'vllm'", "'slow'")),
        ({"engine": {"name": "openai", "url": "http://a:1"}}, ("'slow'",)),
        ({"policy": {"name": "fcfs"}}, ("'slow'", "'fcfs'")),
    ],
)
def test_what_cannot_stand_beside_servers_is_named(servers, changes, named):
    spec = {"engine": {"name": "vllm"}, "workers": 1, "policy": VLLM} | changes
    write_server(servers.parent, "slow", **spec)
    if "engine" in changes:
        write_kind(servers.parent, "slow", workers=1, **changes)
    with pytest.raises(InputError) as caught:
        world_of(open_fleet(servers).kinds, max_new_tokens=64)
    assert says(caught.value.message, *named)


def test_recipes_and_fleets_are_told_apart(unequal):
    assert is_fleet(unequal)
    assert not is_fleet(unequal.with_name("large.yaml"))
    with pytest.raises(InputError, match=r"fleet\.yaml"):
        load_recipe(unequal)


@pytest.mark.slow
@pytest.mark.usefixtures("short_chat")
def test_commands_take_a_fleet_where_they_take_a_recipe(unequal, monkeypatch, capsys):
    monkeypatch.chdir(unequal.parent)
    assert llmctl("simulate", "--fleet", "fleet.yaml", "--trace", "chat-small", "--json") == 0
    metrics = json.loads(capsys.readouterr().out)
    assert sum(key.startswith("utilisation_worker_") for key in metrics) == 3
    scaling = metrics["trace"]["scaling"]
    options = "--trials 1 --draws 1 --jobs 1 --trace chat-small --rate 10"
    assert llmctl("tune", "fleet.yaml", *options.split()) == 0
    assert json.loads(Path("tuning.json").read_text())["scaling"] == scaling
    assert llmctl("render", "fleet.yaml", "--tuning", "tuning.json") == 0
    assert read_file(Plan, "plan.json").workers == 3
    assert llmctl("render", "fleet.yaml", "--tuning", "tuning.json", "--check") == 0
    assert llmctl("render", "plan.json", "--target", "local") == 0
    assert llmctl("render", "plan.json", "--target", "kubernetes") != 0
    assert says(capsys.readouterr().err, "'kubernetes'")
    assert llmctl("serve", "plan.json", "--ray", "local", "--port", "0") != 0
    assert "--ray local" in capsys.readouterr().err


def test_a_plan_of_servers_has_each_kinds_flags_and_one_router(servers):
    plan, _ = plan_from(servers, None, None)
    write_file(plan, servers.with_name("plan.json"))
    again = read_file(Plan, servers.with_name("plan.json"))
    assert again == plan
    assert (plan.workers, plan.kind_numbers) == (3, [0, 1, 1])
    assert plan.replica_router == RouterSpec(name="round-robin")
    assert [plan.policy_of(k)["max_num_seqs"] for k in (0, 1)] == [32, 8]
    assert plan.policy_of(1)["watermark"] == 0.0  # a default: all flags are written down
    assert plan.explained["workers"].source.startswith("recipe: 1 of fast, 2 of slow")
    assert plan.explained["slow: max_num_seqs"].value == "8"
    alone = plan.alone(1)
    assert (alone.recipe.name, alone.workers, alone.others) == ("slow", 2, [])
    assert alone.policy.parameters["max_num_seqs"] == 8
    assert "others" not in file_text(alone)
    changed = override(plan, None, ["max_num_seqs=4"], None)
    assert [changed.policy_of(k)["max_num_seqs"] for k in (0, 1)] == [4, 4]
    assert [changed.policy_of(k)["max_num_batched_tokens"] for k in (0, 1)] == [512, 256]


@pytest.mark.slow
@pytest.mark.usefixtures("short_chat")
def test_tune_searches_the_router_before_unlike_servers(servers, monkeypatch, capsys):
    monkeypatch.chdir(servers.parent)
    for name, price in (("fast", 4.0), ("slow", 1.5)):
        file = Path(f"{name}.yaml")
        write_file(changed(load_recipe(file), hardware__usd_per_hour=price), file)
    options = ["--trials", "4", "--draws", "1", "--jobs", "1", "--trace", "chat-small"]
    words = ["tune", "fleet.yaml", *options, "--rate", "20", "--routers", "by-law"]
    assert llmctl(*words) in (0, 5)
    assert says(" ".join(capsys.readouterr().err.split()), "fast", "slow")
    tuned = json.loads(Path("tuning.json").read_text())
    assert tuned["workers"] == 3
    assert tuned["cost"]["usd_per_hour"] == 7.0
    routers = {trial["outcome"]["replica_router"]["name"] for trial in tuned["trials"]}
    assert routers == {"round-robin", "by-law"}
    chosen = tuned["defaults" if tuned["keep_defaults"] else "best"]
    plan, _ = plan_from(servers, None, Path("tuning.json"))
    assert plan.replica_router is not None
    assert plan.replica_router.name == chosen["replica_router"]["name"]
    assert plan.policy_of(0)["max_num_seqs"] == chosen["parameters"]["max_num_seqs"]
    assert plan.policy_of(1) == chosen["kind_parameters"]["slow"]
    flags = [
        trial["outcome"]["kind_parameters"]["slow"]["max_num_seqs"] for trial in tuned["trials"]
    ]
    assert flags[0] == 8
    assert len(set(flags)) > 1


def test_a_fleet_of_servers_is_predicted_with_all_laws(servers):
    plan, _ = plan_from(servers, None, None)
    trace = Trace(np.arange(60) / 30, np.full(60, 200), np.full(60, 20), np.full(60, 20))
    usual = predicted(plan, trace)
    assert len(usual.kinds) == 2
    slowed = predicted(plan, trace, ServerConditions(slowdown=2.0))
    for before, after in zip(usual.kinds, slowed.kinds, strict=True):
        means = [one.metrics({})["e2e_mean_s"] for one in (before, after)]
        assert means[1] > 1.5 * means[0]


@pytest.mark.slow
def test_a_simulated_fleet_of_servers_is_shown_by_kind(servers, monkeypatch, capsys):
    monkeypatch.chdir(servers.parent)
    words = ["simulate", "--fleet", "fleet.yaml", "--policy", "vllm"]
    words += ["--set", "replica_router=by-law"]
    assert llmctl(*words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    fast = found["kinds"]["fast"]
    slow = found["kinds"]["slow"]
    assert (fast["workers"], slow["workers"]) == (1.0, 2.0)
    assert fast["requests"] + slow["requests"] == found["requests"]
    assert fast["requests"] > slow["requests"]
    assert found["parameters"]["max_num_seqs"] == 32  # the first kind's, from its recipe
    assert llmctl(*words) == 0
    assert "by kind" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "tune fleet.yaml --workers auto",
        "simulate --fleet fleet.yaml --workers 2",
        "serve fleet.yaml --workers 2",
    ],
)
def test_the_number_of_workers_comes_from_the_fleet(unequal, monkeypatch, capsys, words):
    monkeypatch.chdir(unequal.parent)
    assert llmctl(*words.split()) != 0
    assert "--workers" in capsys.readouterr().err
