"""`llmctl render --templates`: a user's changed copies of templates."""

import shutil
from pathlib import Path

import pytest
from commands import ran, refused
from said import says

from toolkit.deploy.render import TARGETS
from toolkit.files.shipped import shipped_templates

RENDER = "render tiny-llama-cpu --templates mine --target"


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """An empty folder of templates, in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


def copied(mine: Path, target: str, name: str, old: str, new: str) -> Path:
    """A copy of a shipped template with a changed part."""
    text = (shipped_templates() / target / name).read_text()
    assert old in text
    place = mine / name
    place.parent.mkdir(exist_ok=True)
    place.write_text(text.replace(old, new))
    return place


def test_a_changed_template_is_filled_and_the_others_are_the_shipped_ones(mine, capsys):
    copied(mine, "kubernetes", "base/service.yaml.j2", "spec:", "# ours\nspec:")
    ran(capsys, f"{RENDER} kubernetes")
    service = Path("kubernetes/base/service.yaml")
    assert "# ours\n" in service.read_text()
    ran(capsys, "render tiny-llama-cpu --target kubernetes")
    assert "# ours\n" not in service.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "vllm"])
def test_an_unchanged_copy_renders_the_same_files(target, mine, capsys):
    shutil.copytree(shipped_templates() / target, mine, dirs_exist_ok=True)
    ran(capsys, f"render tiny-llama-cpu --target {target}")
    shipped = {path: path.read_bytes() for path in Path(target).rglob("*") if path.is_file()}
    assert "no template" not in ran(capsys, f"{RENDER} {target}").err
    assert {path: path.read_bytes() for path in shipped} == shipped


def test_a_template_of_every_target_is_found_beside_these(mine, capsys):
    (mine / "bench.sh.j2").write_text("# {{ v.name }}\n")
    ran(capsys, f"{RENDER} local")
    assert Path("local/bench.sh").read_text() == "# llmctl-tiny-llama-cpu\n"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("spec:", "spec: {{ v.nothing }}", ("service.yaml.j2:", "nothing")),
        ("spec:", "spec: {% if %}", ("service.yaml.j2:",)),
        ("spec:", "spec: {{ 1 // 0 }}", ("service.yaml.j2:", "zero")),
        ("spec:", "spec: [", ("service.yaml", "line", "not YAML")),
        ("spec:", "spec: {{ v.name | other }}", ("service.yaml.j2:", "other")),
        ("spec:", "{% include 'gone.j2' %}", ("gone.j2",)),
        ("spec:", "spec: {{ '\\\\' | setting }}", ("unit file",)),
    ],
)
def test_a_wrong_template_is_one_line_and_a_hint(old, new, named, mine, capsys):
    copied(mine, "kubernetes", "base/service.yaml.j2", old, new)
    error, *_ = refused(capsys, f"{RENDER} kubernetes")
    assert [part for part in named if part not in error] == []


def test_a_file_of_another_name_and_a_folder_that_is_not_there_are_named(mine, capsys):
    (mine / "servce.sh.j2").write_text("")
    assert says(ran(capsys, f"{RENDER} local").err, "servce.sh.j2")
    error, hint = refused(capsys, "render tiny-llama-cpu --templates none --target local")
    assert says(error, "none")
    assert says(hint, "cp -r", str(shipped_templates() / "local"))
