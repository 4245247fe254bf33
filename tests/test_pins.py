"""What is served is named exactly: the hub's revision of a model, and the image it runs in."""

from pathlib import Path

import orders
import pytest
from pydantic import ValidationError

from toolkit.deploy.render import render_target
from toolkit.deploy.values import Values
from toolkit.files.plan import Plan
from toolkit.files.recipe import ModelSpec
from toolkit.files.shipped import load_recipe, shipped_recipes

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHIPPED = sorted(shipped_recipes().glob("*.yaml"))


def revised(folder: Path, revision: str | None) -> Plan:
    model = orders.GPU["model"] | {"revision": revision}
    return orders.plan(folder, **(orders.GPU | {"model": model}))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_names_the_commit_of_its_model(path: Path) -> None:
    model = load_recipe(path).model
    assert model.pinned
    assert model.source == "random" or model.revision


@pytest.mark.slow
def test_recipes_of_one_model_name_one_commit() -> None:
    models = [load_recipe(path).model for path in SHIPPED]
    named = {(model.source, model.revision) for model in models}
    assert len(named) == len({model.source for model in models})


@pytest.mark.parametrize(
    ("source", "revision", "pinned"),
    [
        ("org/model", COMMIT, True),
        ("org/model", "main", False),
        ("org/model", COMMIT[:12], False),
        ("org/model", COMMIT.upper(), False),
        ("org/model", None, False),
        ("/srv/model", None, True),
        ("./model", None, True),
    ],
)
def test_only_a_whole_commit_pins_a_model_of_the_hub(
    source: str, revision: str | None, pinned: bool
) -> None:
    assert ModelSpec(source=source, revision=revision, max_model_len=64).pinned == pinned


@pytest.mark.parametrize("revision", ["", "--trust-remote-code", "a b", "../x", "main;rm"])
def test_what_is_no_revision_is_refused(revision: str) -> None:
    with pytest.raises(ValidationError, match="revision"):
        ModelSpec(source="org/model", revision=revision, max_model_len=64)


@pytest.mark.parametrize(
    ("revision", "pinned"),
    [(COMMIT, True), ("main", False), (None, False)],
)
def test_a_plan_says_which_revision_is_loaded(
    tmp_path: Path, revision: str | None, pinned: bool
) -> None:
    made = revised(tmp_path, revision)
    told = made.explained["model revision"]
    assert revision is None or told.value == revision
    assert told.source.startswith("NOT PINNED") != pinned


def test_a_model_that_is_not_the_hubs_has_no_revision(tmp_path: Path) -> None:
    assert "model revision" not in orders.plan(tmp_path).explained


def test_the_revision_is_what_every_server_loads(tmp_path: Path) -> None:
    made = revised(tmp_path, COMMIT)
    plan = render_target("kubernetes", orders.order(made))["base/plan.json"]
    assert f'"revision": "{COMMIT}"' in plan
    model = orders.VLLM["model"] | {"revision": COMMIT}
    vllm = orders.plan(tmp_path, orders.INSIDE, **(orders.VLLM | {"model": model}))
    assert f"--revision {COMMIT}" in render_target("vllm", orders.order(vllm))["serve.sh"]


def test_an_image_by_tag_is_said_to_be_not_pinned(tmp_path: Path) -> None:
    made = orders.plan(tmp_path)
    tag = "registry.example.com/llmctl:0.1.0"
    for image, pinned in ((tag, False), (f"{tag}@sha256:{'0' * 64}", True)):
        values = Values(orders.order(made, image=image), front=False, cluster=False)
        assert ("NOT PINNED" in values.image.source) != pinned
