"""Rendered files, read back and checked with the validators of their readers."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner

from toolkit.deploy.order import Order
from toolkit.deploy.render import PROGRAM, render_target

# Of systemd 254 or later; older ones say that they ignore them.
NEWER = ("RestartSteps", "RestartMaxDelaySec")

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="needs systemd-analyze"
)
needs_kubectl = pytest.mark.skipif(
    not shutil.which("kubectl"), reason="needs kubectl: https://kubernetes.io/docs/tasks/tools"
)
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="needs promtool: Debian's package prometheus has it"
)


def objects_of(order: Order, target: str = "kubernetes") -> dict[str, Any]:
    """What the YAML files hold, by their names."""
    files = render_target(target, order)
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


def services(order: Order) -> dict[str, Any]:
    """The services of Compose."""
    found: dict[str, Any] = objects_of(order, "compose")["compose.yaml"]["services"]
    return found


def complaints(order: Order, folder: Path) -> list[str]:
    """What systemd-analyze says of the units, with a program that exists; its exit code says
    nothing.
    """
    files = render_target("systemd", order)
    units = {name: text for name, text in files.items() if name.endswith((".service", ".target"))}
    for name, unit in units.items():
        text = unit.replace(PROGRAM, sys.executable)
        (folder / name).write_text(text)
        (folder / name.replace("@", "@0")).write_text(text)
    paths = [folder / name.replace("@", "@0") for name in units]
    command = ["systemd-analyze", "verify", "--man=no", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if not any(key in line for key in NEWER)]


def check_compose(order: Order, folder: Path) -> None:
    """The file of Compose is as its specification says."""
    (folder / "compose.yaml").write_text(render_target("compose", order)["compose.yaml"])
    words = ["--builtin-schema", "vendor.compose-spec", str(folder / "compose.yaml")]
    done = CliRunner().invoke(check_jsonschema.main, words)
    assert done.exit_code == 0, done.output


def kustomized(order: Order, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """The objects that kustomize builds of base/ and of the overlays over it."""
    for name, text in render_target("kubernetes", order).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for root in ("base", "monitoring", "autoscaling"):
        command = ["kubectl", "kustomize", folder / root]
        built = subprocess.run(command, capture_output=True, text=True, check=True)
        yield list(yaml.safe_load_all(built.stdout))


def check_with_promtool(folder: Path, tests: list[dict[str, Any]], rules: object = None) -> None:
    """Have promtool run these tests of the rules."""
    whole: dict[str, Any] = {"evaluation_interval": tests[0]["interval"], "tests": tests}
    if rules is not None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        whole["rule_files"] = ["rules.yaml"]
    (folder / "test.yaml").write_text(yaml.safe_dump(whole))
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
