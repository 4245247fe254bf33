"""Units for another machine: they name `--prefix`, and the commands that copy the files there; and
how a client reads its key back.
"""

import re
import shlex
from pathlib import Path

import orders
import pytest
from commands import llmctl
from rendered import complaints, needs_systemd
from test_deploy_replicas import shipped  # noqa: F401 (a fixture)

from toolkit.deploy.order import Options, Order
from toolkit.deploy.render import render_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.files.plan import Plan

PREFIX = "/opt/serving"
HERE = "/srv/where-it-was-rendered"


@pytest.fixture(params=["one server", "replicas"])
def order(request: pytest.FixtureRequest, tmp_path: Path, shipped: Plan) -> Order:  # noqa: F811
    plan = shipped if request.param == "replicas" else orders.plan(tmp_path)
    return orders.order(plan, folder=HERE, prefix=PREFIX)


def commands_of(order: Order, target: str = "systemd") -> list[str]:
    """The commands at the head of the first file."""
    head = next(iter(render_target(target, order).values()))
    return re.findall(r"^#   (.*)$", head, re.MULTILINE)


def test_every_path_of_the_files_is_below_the_prefix(order: Order) -> None:
    files = render_target("systemd", order)
    units = [text for name, text in files.items() if name.endswith((".service", ".target"))]
    read = re.findall(r"(?:LoadCredential=plan.json:|EnvironmentFile=)(\S+)", "\n".join(units))
    assert read
    for path in read:
        name = path.removeprefix(f"{PREFIX}/{order.name}/").replace("%i", "0")
        assert name in files, "the copied folder has it"
    assert all(HERE not in text for text in files.values())


@pytest.mark.slow
def test_the_commands_copy_the_folder_and_link_its_copy(order: Order) -> None:
    commands = commands_of(order)
    folder = f"{PREFIX}/{order.name}"
    assert any(f"sudo install -d {folder} &&" in line for line in commands)
    (link,) = [shlex.split(line) for line in commands if "systemctl link" in line]
    files = render_target("systemd", order)
    for unit in link[3:]:
        assert unit.removeprefix(f"{folder}/") in files
    (copy,) = [shlex.split(line, comments=True) for line in commands if " cp " in line]
    assert copy[-5:] == ["sudo", "cp", "-r", ".", folder]


@pytest.mark.slow
@needs_systemd
def test_systemd_finds_nothing_in_the_units(order: Order, tmp_path: Path) -> None:
    assert complaints(order, tmp_path) == []


@pytest.mark.parametrize("prefix", ["etc/llmctl", "/etc/ll mctl", "/etc/../x\n", "~/x"])
def test_a_prefix_is_a_plain_absolute_path(prefix: str) -> None:
    with pytest.raises(InputError, match="--prefix"):
        Options(prefix=prefix)


def test_the_command_line_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(orders.plan(tmp_path), "plan.json")
    words = ["--target", "systemd", "--prefix", "/etc/llmctl/"]
    assert llmctl("render", "plan.json", *words) == 0
    unit = Path("systemd/llmctl-test.service").read_text()
    assert "LoadCredential=plan.json:/etc/llmctl/llmctl-test/plan.json\n" in unit


@pytest.mark.parametrize("target", ["systemd", "compose", "kubernetes"])
def test_a_client_is_told_how_to_read_its_key_back(tmp_path: Path, target: str) -> None:
    order = orders.order(orders.plan(tmp_path), namespace="ns")
    (line,) = [one for one in commands_of(order, target) if one.startswith("export LLMCTL_API_KEY")]
    if target in ("systemd", "compose"):
        assert f"sudo cat /etc/llmctl/{order.name}.key" in line
        return
    words = shlex.split(line.partition("$(")[2].partition(" | ")[0])
    assert words[:6] == ["kubectl", "-n", "ns", "get", "secret", order.name]
    assert words[-1] == "jsonpath={.data.api-key}", "the key under which the Secret was created"
