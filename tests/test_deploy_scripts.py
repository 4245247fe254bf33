"""Rendered shell scripts, read by shellcheck where it is installed."""

import shutil
import subprocess
from pathlib import Path

import orders
import pytest
import samples

from toolkit.deploy.order import Order
from toolkit.deploy.render import TARGETS, render_target
from toolkit.files.tuning import Settings

NEEDS = "shellcheck is not installed: pip install 'llmctl-toolkit[dev]', or the system's package"
MINE = Settings(policy="past-future", parameters={"chunk_tokens": 256})


@pytest.fixture(params=["cpu", "gpu", "untuned"])
def order(request: pytest.FixtureRequest, tmp_path: Path) -> Order:
    if request.param == "cpu":
        return orders.order(orders.plan(tmp_path))
    if request.param == "gpu":
        server = {"name": "openai", "url": "http://127.0.0.1:8000"}
        alone = orders.GPU | {"workers": 1, "engine": server}
        return orders.order(orders.plan(tmp_path, MINE, samples.fit(workers=1), **alone))
    tuned = orders.plan(tmp_path, **orders.GPU)
    return orders.order(orders.changed(tuned, workload=None, outcome__metrics={}))


def scripts(order: Order) -> dict[str, str]:
    """All scripts of all targets that take the plan, by target and name."""
    left_out = {"vllm"}
    if order.plan.recipe.engine.name == "openai":
        left_out = TARGETS.keys() - left_out
    found = {}
    for target in TARGETS.keys() - left_out:
        files = render_target(target, order)
        found |= {
            f"{target}-{name.replace('/', '-')}": text
            for name, text in files.items()
            if name.endswith(".sh")
        }
    return found


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason=NEEDS)
def test_shellcheck_finds_nothing_in_any_script(order: Order, tmp_path: Path) -> None:
    for name, text in scripts(order).items():
        (tmp_path / name).write_text(text)
    options = "--severity=style --enable=quote-safe-variables,deprecate-which --shell=bash"
    check = ["shellcheck", *options.split(), *sorted(tmp_path.glob("*.sh"))]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
