"""The rendered files of two shipped recipes, as objects: each change of them is on purpose.

To write tests/data/frozen/deploy anew: python tests/test_deploy_frozen.py; git shows what changed.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy.order import Options, Order
from toolkit.deploy.render import TARGETS, render_target
from toolkit.errors import InputError
from toolkit.files.io import file_text
from toolkit.files.shipped import recipe_path

FROZEN = Path(__file__).parent / "data" / "frozen" / "deploy"
CASES = {
    "llama-3.1-8b-h200-1": ("llama-3.1-8b-h200", 1),
    "llama-3.1-8b-h200-2": ("llama-3.1-8b-h200", 2),
    "tiny-llama-cpu": ("tiny-llama-cpu", 0),
}
# Kept elsewhere: the plan, the shipped dashboards, and the program that asks a replica for a token.
LEFT_OUT = ("plan.json", "dashboard.json", "alive.py")


def content(name: str, text: str) -> Any:
    """The objects of YAML, and the lines of other files that are no comments; without digests."""
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)
    if name.endswith(".yaml"):
        return yaml.safe_load(text)
    return [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]


def rendered(case: str, target: str) -> Any:
    recipe, replicas = CASES[case]
    plan = Scenario.open(ScenarioOptions(recipe=recipe_path(recipe), fit=recipe)).make_plan()
    text = file_text(plan)
    options = Options(folder="/srv/llmctl", replicas=replicas)
    try:
        files = render_target(target, Order(plan, text, options))
    except InputError as error:
        return {"refused": error.message}
    shown = {name: text for name, text in files.items() if not name.endswith(LEFT_OUT)}
    return {name: content(name, text) for name, text in shown.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_rendered_files_are_as_frozen(case: str, target: str) -> None:
    frozen = json.loads((FROZEN / f"{case}-{target}.json").read_text(encoding="utf-8"))
    assert rendered(case, target) == frozen


if __name__ == "__main__":
    for case in CASES:
        for target in TARGETS:
            text = json.dumps(rendered(case, target), indent=1, sort_keys=True) + "\n"
            (FROZEN / f"{case}-{target}.json").write_text(text, encoding="utf-8")
