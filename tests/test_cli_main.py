"""The command line: imports, output streams, and exit codes."""

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from commands import llmctl, ran
from said import says

from toolkit.cli import main
from toolkit.errors import EngineError, InputError, LlmctlError, TargetMissedError

HEAVY = {
    "torch",
    "transformers",
    "ray",
    "scipy",
    "optuna",
    "fastapi",
    "starlette",
    "numpy",
    "numba",
    "httpx",
    "jinja2",
    "matplotlib",
}

NAMES = list(main.COMMANDS)


def every_command() -> Iterator[tuple[str, Any]]:
    """The commands, and those of groups, by the words that call them."""
    for name in NAMES:
        loaded = main._load(name)
        if not hasattr(loaded, "commands"):
            yield name, loaded
        for inner, command in getattr(loaded, "commands", {}).items():
            yield f"{name} {inner}", command


@pytest.fixture
def command(monkeypatch) -> Callable[[Callable[[], None]], None]:
    """Replaces the function of `llmctl policies` by another one."""

    def replace(function: Callable[[], None]) -> None:
        module = ModuleType("toolkit.cli.listings")
        module.command = function
        monkeypatch.setitem(sys.modules, "toolkit.cli.listings", module)

    return replace


@pytest.mark.slow
def test_help_loads_nothing_heavy():
    """One process prints the help of all commands; what it has loaded then is what any of them
    loads.
    """
    script = f"""
import sys
from toolkit.cli.main import run
for name in {NAMES}:
    for words in (["--help"], [name, "--help"]):
        try:
            run(words)
        except SystemExit:
            pass
print("\\nloaded", *{{name.partition(".")[0] for name in sys.modules}})
"""
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    assert loaded & HEAVY == set()


def test_help_lists_every_command(capsys):
    shown = ran(capsys, "--help").out
    assert [name for name in NAMES if f" {name} " not in shown] == []
    assert len(shown.splitlines()) <= 28, "about a screen"
    assert [title for title in main.GROUPS if title not in shown] == []


def test_every_command_offers_json():
    for name, command in every_command():
        assert any("--json" in one.opts for one in command.params), name


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_no_line_of_the_help_is_cut(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    for name in ("", "trace", "recipe", *(name for name, _ in every_command())):
        shown = ran(capsys, name, "--help").out
        assert max(map(len, shown.splitlines())) <= width, name
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown, name


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("--verbos", "--verbos", "llmctl --help"),
        ("policies --jsn", "--jsn", "llmctl policies --help"),
        ("policies extra", "extra", "llmctl policies --help"),
        ("render", "'RECIPE|PLAN.json'", "llmctl render --help"),
        ("tuen", "'tuen'", "'tune'"),
        ("simulat", "'simulat'", "'simulate'"),
        ("xyz", "'xyz'", "bench"),
    ],
)
def test_a_wrong_word_is_one_line_a_hint_and_exit_2(words, named, remedy, capsys):
    out, err = ran(capsys, words, code=2)
    error, hint = err.splitlines()
    assert out == ""
    assert error.startswith("error: ")
    assert says(error, named)
    assert hint.startswith("hint: ")
    assert says(hint, remedy)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LlmctlError("it failed", "do this"), 1),
        (InputError("it failed", "do this"), 2),
        (EngineError("it failed", "do this"), 3),
        (TargetMissedError("it failed", "do this"), 4),
    ],
)
def test_each_error_has_its_exit_code(error, code, command, capsys):
    def fail() -> None:
        raise error

    command(fail)
    assert ran(capsys, "policies", code=code) == ("", "error: it failed\nhint: do this\n")


def test_a_bug_shows_its_traceback(command):
    def fail() -> None:
        raise ZeroDivisionError

    command(fail)
    with pytest.raises(ZeroDivisionError):
        main.run(["policies"])


def test_an_interrupt_says_what_is_kept(command, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    command(interrupted)
    kept = main.COMMANDS["policies"].interrupted
    assert ran(capsys, "policies", code=130).err == f"\ninterrupted; {kept}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("print('x' * 99 * 100_000)", ["policies"]),
        ("table(['name', 'value'], [('a', 1)])", ["policies"]),
        ("None", ["tune", "--help"]),
    ],
)
def test_a_closed_pipe_on_stdout_is_no_error(printed, words):
    script = f"""
import sys, types
from toolkit.cli.output import table
module = types.ModuleType("toolkit.cli.listings")
module.command = lambda: {printed}
sys.modules["toolkit.cli.listings"] = module
sys.stdin.read()
from toolkit.cli.main import run
run({words})
"""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipe) as writer:
        writer.stdout.close()
        writer.stdin.close()
        message = writer.stderr.read()
    assert (writer.returncode, message) == (141, b"")


@pytest.mark.parametrize(
    "words",
    [
        "tune --help",
        "trace inspect chat-small",
        "simulate unit-step --trace bursty-small --policies fcfs,conservative",
    ],
)
def test_every_text_is_printed_where_stdout_is_no_utf_8(words, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", "strict"))
    assert llmctl(words) == 0
    text = sys.stdout.buffer.getvalue().decode("ascii")
    assert len(text.splitlines()) > 5
    assert "?" not in text


@pytest.mark.slow
def test_a_full_disk_under_stdout_is_one_line():
    """As in `llmctl policies > file`; Python must not complain at exit of unprinted text."""
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "toolkit", "policies"]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert "No space left on device" in error
    assert hint.startswith("hint: ")
