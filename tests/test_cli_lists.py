"""`llmctl recipes`, `llmctl policies`, and shell completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import printed, ran
from test_cli_main import HEAVY

from toolkit.cli import arguments
from toolkit.cli.scenario import Scenario
from toolkit.cli.simulate import SimulateOptions
from toolkit.files.io import shipped_fits
from toolkit.files.shipped import load_recipe, shipped_names
from toolkit.sched.catalogue import ABOUT
from toolkit.sched.policies import KNOWN, ORACLES
from toolkit.sim.world import UNIT_STEP
from toolkit.traces.types import shipped_traces


@pytest.mark.slow
def test_every_recipe_has_its_line(capsys):
    lines = ran(capsys, "recipes").out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {
        line.split()[0]: line.split()[1:]
        for line in lines
        if line.startswith("  ") and line.strip()
    }
    assert sorted(rows) == shipped_names()
    for name, (engine, policy, basis) in rows.items():
        recipe = load_recipe(name)
        assert (engine, policy) == (recipe.engine.name, recipe.policy.name)
        assert (basis == "none") == (name not in shipped_fits())
    assert {basis for _, _, basis in rows.values()} == {"analytic", "measured", "none"}


def test_every_policy_says_what_it_does_and_which_engines_run_it(capsys):
    found = {one["name"]: one for one in printed(capsys, "policies")["policies"]}
    assert found.keys() == KNOWN.keys() == ABOUT.keys()
    assert {name for name, one in found.items() if not one["live"]} == ORACLES
    assert found["slice"]["engines"] == ["rebatch", "transformers", "deepspeed"]
    assert found["vllm"]["engines"] == ["vllm"]
    out = ran(capsys, "policies").out
    assert max(map(len, out.splitlines())) <= 80
    assert [name for name in KNOWN if f" {name} " not in out] == []


def completed(*words: str, cwd: Path | None = None) -> list[str]:
    """What the shell is offered for the last of `words`."""
    line = {"COMP_WORDS": " ".join(["llmctl", *words]), "COMP_CWORD": str(len(words))}
    environment = os.environ | line | {"_LLMCTL_COMPLETE": "complete_bash"}
    script = (
        "import sys\nfrom toolkit.cli.main import run\ntry:\n    run()\nexcept SystemExit:\n    "
        "pass\n"
        "print('loaded', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=cwd,
    )
    *found, loaded = done.stdout.splitlines()
    assert set(loaded.split()) & HEAVY == set()
    return [word for word in found if word]


@pytest.mark.slow
def test_completion_of_commands_and_options_imports_nothing_heavy():
    assert completed("tu") == ["tune"]
    assert "--trace" in completed("tune", "tiny-llama-cpu", "--t")
    assert completed("trace", "insp") == ["inspect"]


@pytest.mark.parametrize(
    ("complete", "known"),
    [
        (arguments.recipes, shipped_names()),
        (arguments.fits, shipped_fits()),
        (arguments.traces, shipped_traces()),
        (arguments.policies, KNOWN),
    ],
)
def test_completion_offers_exactly_the_existing_names(complete, known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complete("") == sorted(known)
    assert complete("no-such") == []


def test_the_clock_of_steps_is_the_simulator_s():
    assert Scenario.open(SimulateOptions(recipe=Path(arguments.UNIT_STEP))).fit is None
    assert arguments.UNIT_STEP == UNIT_STEP
