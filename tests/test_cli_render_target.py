"""`llmctl render --target`: folders are written whole and compared; edited files are not
overwritten.
"""

import json
from pathlib import Path

import orders
import pytest
from commands import llmctl, ran, refused
from said import says

from toolkit.deploy.render import read_manifest
from toolkit.errors import InputError
from toolkit.files import io
from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.files.plan import Plan

CANARY = "sk-canary-7f3a9c51"
LOCAL = {
    "alerts.yaml",
    "bench.sh",
    "dashboard.json",
    "plan.json",
    "rendered.json",
    "serve.sh",
}


@pytest.fixture
def plan(tmp_path, monkeypatch) -> Plan:
    """plan.json in the working directory."""
    monkeypatch.chdir(tmp_path)
    made = orders.plan(tmp_path)
    write_file(made, "plan.json")
    return made


def render(words: str, source: str = "plan.json") -> int:
    return llmctl(f"render {source} {words}")


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()
    }


@pytest.mark.usefixtures("plan")
def test_a_folder_has_the_plan_and_a_way_to_check_it():
    assert render("--target local --out here") == 0
    names = {path.name for path in Path("here").iterdir()}
    assert names == LOCAL
    assert Path("here/plan.json").read_bytes() == Path("plan.json").read_bytes()
    assert Path("here/serve.sh").stat().st_mode & 0o100
    manifest = read_manifest(Path("here"))
    assert manifest.target == "local"


@pytest.mark.usefixtures("plan")
def test_rendering_again_changes_nothing():
    render("--target kubernetes")
    before = contents("kubernetes")
    assert render("--target kubernetes") == 0
    assert contents("kubernetes") == before


@pytest.mark.usefixtures("plan")
def test_files_edited_by_hand_stay(capsys):
    render("--target compose")
    edited = Path("compose/compose.yaml")
    edited.write_text(edited.read_text() + "# mine\n")
    before = contents("compose")
    error, hint = refused(capsys, "render plan.json --target compose")
    assert says(error, "compose/compose.yaml")
    assert "--force" in hint
    assert contents("compose") == before
    assert render("--target compose --force") == 0
    assert "# mine" not in edited.read_text()


@pytest.mark.usefixtures("plan")
def test_files_that_are_no_longer_rendered_are_removed():
    render("--target kubernetes --out x")
    assert render("--target local --out x") == 0
    left = {path.name for path in Path("x").rglob("*") if path.is_file()}
    assert left == LOCAL


@pytest.mark.usefixtures("plan")
def test_a_link_out_of_the_folder_is_not_followed(tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kubernetes").mkdir()
    (tmp_path / "kubernetes" / "base").symlink_to(tmp_path / "elsewhere")
    said = refused(capsys, "render plan.json --target kubernetes")
    assert says(said[0], "base/kustomization.yaml", "link", "kubernetes")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b/c", "a b", ".hidden", "x" * 65, "a\nb", ""]
)
def test_names_that_leave_the_folder_are_refused(name, tmp_path):
    from toolkit.deploy.order import inside

    with pytest.raises(InputError) as caught:
        inside(tmp_path, name)
    assert repr(name) in caught.value.message


@pytest.mark.parametrize("target", ["local", "systemd", "compose", "kubernetes"])
def test_a_secret_in_the_environment_is_in_no_output(plan, target, monkeypatch, capsys):
    for name in ("LLMCTL_API_KEY", "HF_TOKEN", "VLLM_API_KEY", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, CANARY)
    out, err = ran(capsys, f"render plan.json --target {target} --json")
    assert CANARY not in out + err
    assert not any(CANARY.encode() in content for content in contents(target).values())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("recipe", "serve", "api_key"), CANARY),
        (("recipe", "engine", "url"), f"http://user:{CANARY}@host:8000"),
        (("api_key",), CANARY),
        (("inputs", "fit", "sha256"), f"{CANARY}\n"),
    ],
)
def test_a_secret_in_a_plan_is_refused_and_not_repeated(plan, where, value, capsys):
    data = json.loads(Path("plan.json").read_text())
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    if where[-1] == "url":
        inner["name"] = "openai"
        data["recipe"]["workers"] = 1
    Path("plan.json").write_text(json.dumps(data))
    out, err = ran(capsys, "render plan.json --target local", code=2)
    assert CANARY not in out + err
    assert not Path("local").exists()


def test_the_plan_of_a_recipe_is_the_same_on_another_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    orders.plan(tmp_path)
    Path("recipe.yaml").write_text((tmp_path / "recipe.json").read_text())
    about = dict(head({"recipe": "recipe.yaml"}))
    write_file(read_file(Fit, "fit.json").model_copy(update=about), "fit.json")
    assert render("--fit fit.json --target local", source="recipe.yaml") == 0
    assert read_file(Plan, "local/plan.json").recipe.name == "test"
    before = contents("local")
    monkeypatch.setattr(io, "processor", lambda: "another machine's")
    assert render("--fit fit.json --target local", source="recipe.yaml") == 0
    assert contents("local") == before
