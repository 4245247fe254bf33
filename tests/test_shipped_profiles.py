"""The shipped profiles: made from the shipped recipes, with their fits, and found by name."""

import re
from pathlib import Path

import pytest
from commands import llmctl
from said import says

from toolkit.cli.runs import contenders, own_policy
from toolkit.cli.scenario import Scenario
from toolkit.cli.simulate import SimulateOptions
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, head, read_file, shipped_fit
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.shipped import load_recipe, recipe_path, shipped_profiles, shipped_recipes
from toolkit.profiling.analytic import analytic_profile
from toolkit.report.verdict import FEW_REQUESTS
from toolkit.sched.policies import make_any
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import fit_windows, prepare, scale_rate
from toolkit.tuning.workload import cut_trace

NAMES = sorted(path.parent.name for path in shipped_profiles().glob("*/fit.json"))
GPU_RECIPES = [
    name
    for name in NAMES
    if load_recipe(name).hardware.device == "cuda" and not name.endswith("-measured")
]


@pytest.mark.parametrize("name", NAMES)
def test_profile_and_fit_are_of_the_recipe_as_it_is(name: str) -> None:
    folder = shipped_profiles() / name
    recipe = recipe_path(name)
    assert read_file(Profile, folder / "profile.json", {"recipe": recipe}).recipe_name == name
    assert read_file(
        Fit, folder / "fit.json", {"recipe": recipe, "profile": folder / "profile.json"}
    )


def rounded(value: object) -> object:
    """Numbers to nine digits: sums come out otherwise in the last ones in another order."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


@pytest.mark.parametrize("name", GPU_RECIPES)
def test_a_user_without_a_gpu_can_tune_for_one(name: str) -> None:
    """Analytic, marked so, and what `llmctl profile --analytic` makes today."""
    shipped = read_file(Profile, shipped_profiles() / name / "profile.json")
    made = analytic_profile(load_recipe(recipe_path(name)), head({"recipe": recipe_path(name)}))
    own = {"tool_version", "environment", "inputs"}
    found = rounded(made.model_dump(exclude=own))
    assert rounded(shipped.model_dump(exclude=own)) == found, "see profiles/README.md"
    assert shipped.engine.analytic
    assert read_file(Fit, shipped_profiles() / name / "fit.json").engine == shipped.engine


@pytest.mark.parametrize("name", NAMES)
def test_the_default_trace_has_windows_for_every_recipe(name: str) -> None:
    recipe = load_recipe(recipe_path(name))
    fit = read_file(Fit, shipped_profiles() / name / "fit.json")
    workload = cut_trace(recipe, fit, read_trace(trace_path("chat-small"))[0])
    assert (len(workload.windows.search), len(workload.windows.held_out)) == (
        recipe.tune.windows,
        recipe.tune.held_out_windows,
    )
    assert sum(len(window.trace) for window in workload.windows.held_out) >= FEW_REQUESTS


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped_recipes().glob("*.yaml")))
@pytest.mark.parametrize("trace", ["chat-small", "bursty-small"])
def test_shipped_traces_have_windows_at_any_rate(name: str, trace: str) -> None:
    spec = load_recipe(recipe_path(name)).tune
    whole = read_trace(trace_path(trace))[0]
    for rate in (0.5, 5.0, 50.0, 500.0):
        found = fit_windows(
            scale_rate(whole, rate), spec.window_s, spec.windows, spec.held_out_windows
        )
        assert len(found.search) == spec.windows
        assert len(found.held_out) == spec.held_out_windows


@pytest.mark.parametrize("name", NAMES)
def test_simulate_has_what_tune_has(name: str) -> None:
    recipe = load_recipe(recipe_path(name))
    scenario = Scenario.open(SimulateOptions(recipe=recipe_path(name), trace="bursty-small"))
    trace = scenario.fitted_trace()
    tuned = prepare(read_trace(trace_path("bursty-small"))[0], recipe)
    assert list(trace.rows()) == list(tuned.rows())
    assert trace.scaling == tuned.scaling
    assert tuned.scaling is not None
    [own] = contenders(scenario, trace, [own_policy(scenario)])
    assert own.policy == make_any(recipe.policy.name, recipe.policy.parameters)
    assert own.world.max_new_tokens == recipe.serve.max_new_tokens
    assert (own.world.workers, scenario.targets) == (recipe.workers, recipe.sla)


def test_a_fit_is_a_path_or_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_profiles() / "tiny-llama-cpu" / "fit.json"
    assert fit_path("tiny-llama-cpu") == shipped == shipped_fit("tiny-llama-cpu")
    assert fit_path("fit.json") == Path("fit.json")  # reading it gives the error
    (tmp_path / "tiny-llama-cpu").write_text("a file of that name comes first")
    assert fit_path("tiny-llama-cpu") == Path("tiny-llama-cpu")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(InputError, match=r"llama-3\.1-8b-h20\b") as caught:
        fit_path("llama-3.1-8b-h20")
    assert says(caught.value.hint, "'llama-3.1-8b-h200'")
    assert shipped_fit("../recipes") is None


def test_without_a_fit_here_the_shipped_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert llmctl("render", "llama-3.1-8b-h200") == 0
    assert read_file(Plan, "plan.json", {"fit": fit_path("llama-3.1-8b-h200")}).fit.engine.analytic


@pytest.mark.slow
def test_commands_take_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert llmctl("render", "tiny-llama-cpu", "--fit", "tiny-llama-cpu") == 0
    words = "tiny-llama-cpu --trace chat-small --policies slice"
    assert llmctl("simulate", *words.split()) == 0
    assert (tmp_path / "plan.json").exists()


def test_the_readme_of_the_profiles_lists_them_all() -> None:
    text = (shipped_profiles() / "README.md").read_text()
    assert re.findall(r"^\| `([^`]+)` \|", text, re.M) == NAMES
