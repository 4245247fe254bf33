"""No command writes over a file that it reads, also behind links and under another spelling."""

import os
import shutil
from pathlib import Path

import pytest
import samples
from commands import llmctl, refused
from test_cli_main import every_command
from test_cli_render import RECIPE
from test_traces_histograms import EARLY, page

from toolkit.cli.arguments import OUTPUTS, keep_inputs
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.traces.types import FOLDER

LOG = "time,prompt_tokens,completion_tokens\n0.5,5,6\n2.5,7,8\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with recipe.yaml, profile.json, fit.json, plan.json, log.csv and a page."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("recipe.yaml").write_text(RECIPE)
        samples.write_fit(Path("recipe.yaml"))
        assert llmctl("render recipe.yaml --fit fit.json") == 0
    (folder / "log.csv").write_text(LOG)
    (folder / "page").write_text(page(*EARLY))
    return folder


@pytest.fixture
def stage(made, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, with links to log.csv."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("log.csv")
    os.link("log.csv", "hard")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize(
    "command",
    [
        "trace convert log.csv log.csv",
        "trace convert log.csv ./log.csv",
        "trace convert log.csv link",
        "trace convert link log.csv",
        "trace convert log.csv hard",
        "trace generate --metrics page --out page",
        "profile recipe.yaml --out recipe.yaml",
        "fit profile.json --out profile.json",
        "tune recipe.yaml --out fit.json",
        "tune recipe.yaml --trace log.csv --out link",
        "render recipe.yaml --fit fit.json --out recipe.yaml",
        "render recipe.yaml --fit fit.json --out fit.json",
        "render recipe.yaml --fit fit.json --trace log.csv --out log.csv",
        "bench --trace log.csv --out log.csv",
        "bench --trace log.csv --save-requests log.csv",
        "bench --plan plan.json --out plan.json",
        "bench --out new.json --save-requests new.json",
        "report recipe.yaml --out recipe.yaml",
        "report plan.json --out plan.json",
        "report recipe.yaml --out fit.json",
        "serve plan.json --request-log plan.json",
        "serve plan.json --event-log plan.json",
    ],
)
def test_an_output_that_is_an_input_is_refused(command, stage, capsys):
    before = contents(stage)
    error, _hint = refused(capsys, command)
    assert "written over" in error or "two outputs" in error
    assert contents(stage) == before


@pytest.mark.parametrize("out", ["pipe", "link to a pipe", "loop"])
@pytest.mark.parametrize(
    "command",
    [
        "trace convert log.csv",
        "trace generate --rate 5 --duration 3 --out",
        "trace record --upstream http://127.0.0.1:9 --out",
        "fit profile.json --out",
        "profile recipe.yaml --out",
        "tune recipe.yaml --fit fit.json --trace log.csv --out",
        "render recipe.yaml --fit fit.json --out",
        "report plan.json --out",
        "bench --trace log.csv --out",
        "bench --trace log.csv --save-requests",
        "serve plan.json --request-log",
    ],
)
def test_a_named_pipe_or_a_link_to_itself_is_no_output(command, out, stage, capsys):
    os.mkfifo("pipe")
    Path("link to a pipe").symlink_to("pipe")
    Path("loop").symlink_to("loop")
    before = contents(stage)
    refused(capsys, command, out)
    assert Path("pipe").is_fifo()
    assert contents(stage) == before


def test_a_shipped_trace_is_kept():
    with pytest.raises(InputError):
        keep_inputs({"trace": "chat-small", "out": FOLDER / "chat-small.jsonl"})


def test_an_older_output_is_replaced(stage):
    Path("out.jsonl").write_text("{}")
    assert llmctl("trace convert log.csv out.jsonl") == 0
    assert llmctl("trace convert log.csv out.jsonl") == 0
    assert llmctl("render recipe.yaml --fit fit.json") == 0


@pytest.mark.slow
def test_a_rendered_file_does_not_replace_an_input_even_with_force(stage):
    words = ["--target", "local", "--out", "."]
    assert llmctl("render plan.json", *words) == 0  # the plan stays as it is
    Path("bench.sh").write_text(LOG)
    words += ["--trace", "bench.sh", "--force"]
    assert llmctl("render recipe.yaml --fit fit.json", *words) == 2
    assert Path("bench.sh").read_text() == LOG


def test_a_file_that_a_result_was_made_from_is_kept_where_no_option_names_it(stage):
    made = read_file(Fit, "fit.json").model_copy(update=dict(head({"trace": "log.csv"})))
    with pytest.raises(InputError):
        write_file(made, "log.csv")
    assert Path("log.csv").read_text() == LOG
    write_file(made, "fit.json")


def test_every_option_that_names_a_file_to_write_is_checked():
    found = set()
    for _, command in every_command():
        for parameter in command.params:
            help_text = getattr(parameter, "help", None) or ""
            writes = help_text.startswith("Write")
            if writes and not getattr(parameter, "is_flag", False):
                found.add(parameter.name)
    # `render --target` names a kind of files; `tune --live` writes a plan beside its --out
    assert found - {"target"} | {"plan_out"} == set(OUTPUTS)
