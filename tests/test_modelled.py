"""Every command refuses what llmctl does not model, in one line with the reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples
from commands import llmctl
from test_classes import CONFIGS, FULL, ONE, WINDOW

from toolkit.catalogue.classes import MODELLED, of_config, refused
from toolkit.catalogue.gpus import GPUS
from toolkit.catalogue.resolved import Drafts, Resolved
from toolkit.deploy.doctor import check_sizes
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.find_model import FoundModel
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_file
from toolkit.files.modelled import classes_of, refuse_fit, refuse_recipe
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.profile import Profile

PROFILES = Path(__file__).parents[1] / "profiles"

# the models of which some class is not modelled, with those classes
REFUSED = {
    model: names - set(MODELLED) for model, (_, names) in CONFIGS.items() if names - set(MODELLED)
}
MEDIA = [model for model, names in REFUSED.items() if names == {"media"}]
DRAFTS = ["--speculative-config", '{"method": "ngram"}']


def recipe_with(config: dict[str, Any] | None = None, args: list[str] | None = None) -> Any:
    changes: dict[str, Any] = {"engine": {"name": "vllm", "vllm": {"args": args or []}}}
    changes |= {"workers": 1, "policy": {"name": "vllm"}}
    recipe = samples.recipe(**changes)
    if config is None:
        return recipe
    # longer than any chunk of attention: one that no request outgrows is full attention
    changed = {"config": config, "max_model_len": 65_536}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=changed)})


def unmodelled(config: dict[str, Any]) -> list[str]:
    """What a model has that is not modelled, as the errors call it."""
    return [one.what for one in refused(of_config(config))]


def measured_on(resolved: Resolved | None) -> Fit:
    fit = samples.paged_fit()
    assert fit.steps is not None
    return fit.model_copy(update={"steps": fit.steps.model_copy(update={"resolved": resolved})})


@pytest.mark.parametrize("model", sorted(REFUSED.keys() - MEDIA))
def test_no_recipe_is_made_for_a_model_that_is_not_modelled(model: str) -> None:
    config = CONFIGS[model][0]
    found = FoundModel(name=model, config=config, source=model, revision="", origin="a test")
    with pytest.raises(InputError) as refusal:
        new_recipe(found, Wish(GPUS["h200"]))
    assert all(what in refusal.value.message for what in unmodelled(config))


@pytest.mark.parametrize("model", REFUSED)
def test_a_recipe_of_such_a_model_is_refused(model: str) -> None:
    config = CONFIGS[model][0]
    with pytest.raises(InputError) as refusal:
        refuse_recipe(recipe_with(config))
    assert all(what in refusal.value.message for what in unmodelled(config))


@pytest.mark.parametrize("model", sorted(CONFIGS.keys() - REFUSED.keys()))
def test_a_recipe_of_a_model_with_windows_or_states_is_not_refused(model: str) -> None:
    refuse_recipe(recipe_with(CONFIGS[model][0]))


def test_a_recipe_with_drafts_is_refused_and_others_are_not() -> None:
    with pytest.raises(InputError, match="speculative"):
        refuse_recipe(recipe_with(args=DRAFTS))
    refuse_recipe(recipe_with())


def test_the_doctor_names_what_is_not_simulated_and_refuses_nothing() -> None:
    recipe = recipe_with(args=["--tool-call-parser", "hermes"])
    refuse_recipe(recipe)
    [check] = [one for one in check_sizes(recipe) if one.name == "not simulated"]
    assert check.status == "note"
    assert "--tool-call-parser" in check.found


def test_a_server_that_runs_already_is_measured_from_outside() -> None:
    recipe = samples.recipe(
        engine={"name": "openai", "url": "http://127.0.0.1:1"}, workers=1, policy={"name": "vllm"}
    )
    config = recipe.model.model_copy(update={"config": CONFIGS["gpt-oss-20b"][0]})
    assert classes_of(recipe.model_copy(update={"model": config})) == []


@pytest.mark.parametrize(
    ("resolved", "named"),
    [
        (replace(ONE, groups=[replace(WINDOW, kind="chunk"), FULL]), "chunk"),
        (replace(ONE, drafts=Drafts("mtp", 2)), "mtp"),
    ],
)
def test_laws_of_such_a_server_are_not_used(resolved: Resolved, named: str) -> None:
    fit = measured_on(resolved)
    with pytest.raises(InputError, match=named):
        refuse_fit(fit)
    with pytest.raises(InputError, match=named):
        laws_from_fit(fit)


@pytest.mark.slow
def test_a_profile_of_such_a_server_gets_no_fit(tmp_path: Path, capsys) -> None:
    measured = read_file(Profile, PROFILES / "llama-3.1-8b-a100-80gb/profile.json")
    steps = measured.steps
    assert steps is not None
    steps = steps.model_copy(update={"resolved": replace(ONE, pp=2)})
    write_file(measured.model_copy(update={"steps": steps}), tmp_path / "profile.json")
    words = ("fit", str(tmp_path / "profile.json"), "--out", str(tmp_path / "fit.json"))
    assert llmctl(*words) == 2
    assert "pipeline" in capsys.readouterr().err
    assert not (tmp_path / "fit.json").exists()


def test_what_was_resolved_stays_in_the_fit(tmp_path: Path) -> None:
    resolved = replace(ONE, quantization="fp8", experts=[8, 2])
    write_file(measured_on(resolved), tmp_path / "fit.json")
    read = read_file(Fit, tmp_path / "fit.json")
    assert read.steps is not None
    assert read.steps.resolved == resolved
    content = json.loads((tmp_path / "fit.json").read_text())
    del content["steps"]["resolved"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = read_file(Fit, tmp_path / "old.json")
    assert old.steps is not None
    assert old.steps.resolved is None
    laws_from_fit(old)
