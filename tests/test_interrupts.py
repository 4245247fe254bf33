"""Ctrl-C: where its handler runs, what the simulator does then, and how a command ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from commands import llmctl, ran

from toolkit import interrupts
from toolkit.__main__ import main as entry_point
from toolkit.cli import main as command_line
from toolkit.interrupts import EXIT_CODE, check, held
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.base import Policy
from toolkit.sched.view import Decision, View
from toolkit.sim.api import simulate
from toolkit.sim.loop import CHECK_EVERY
from toolkit.sim.world import UNIT_STEP, make_world
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

VLLM = "--policy vllm --fit llama-3.1-8b-h200"
ROOT = Path(interrupts.__file__).parent.parent


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handler() -> Iterator[Callable[[], interrupts._CommandLine]]:
    """Sets the command line's handler anew; ends with those that were there."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}

    def catch() -> interrupts._CommandLine:
        fresh = interrupts._CommandLine()
        signal.signal(signal.SIGINT, fresh)
        return fresh

    yield catch
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, old in before.items():
        signal.signal(number, old)


def test_a_signal_in_held_work_comes_at_its_end():
    done = []

    def work() -> None:
        with held():
            press()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_check_lets_the_signal_in():
    done = []

    def work() -> None:
        with held():
            check()
            press()
            check()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done


def test_an_outer_block_holds_the_checks_of_an_inner_one():
    done = []

    def work() -> None:
        with held():
            with held():
                press()
                check()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done


def test_another_thread_takes_no_signal_of_the_main_one():
    ended = []

    def other() -> None:
        with held():
            check()
        ended.append(1)

    def work() -> None:
        with held():
            press()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert ended


class PressingPolicy(Policy):
    """A policy that runs batches as `sequence` does, and is interrupted at its third decision."""

    name = "pressing"
    continuous = False

    def __init__(self) -> None:
        self._policy = make_policy("sequence", {"batch_size": 1})
        self.decisions = 0
        self.after = 0

    def route(self, view: View, now_s: float) -> None:
        return None

    def plan(self, view: View, now_s: float) -> Decision:
        self.decisions += 1
        if self.decisions == 3:
            press()
        self.after += self.decisions >= 3
        return self._policy.plan(view, now_s)


def test_a_simulation_ends_between_two_events():
    policy = PressingPolicy()
    trace = read_trace(trace_path("bursty-small"))[0]
    world = make_world(None, {}, workers=1, max_new_tokens=0, seed=0)
    with pytest.raises(KeyboardInterrupt):
        simulate(trace, policy, world)
    assert 1 <= policy.after <= CHECK_EVERY + 1 < len(trace)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    "words",
    [
        f"--policy fcfs --fit {UNIT_STEP}",
        VLLM,
        f"{VLLM} --workers 2 --set replica_router=prefix",
    ],
)
def test_every_loop_of_the_simulator_looks_for_the_signal(words, monkeypatch, capsys):
    from toolkit.sim import api

    def requests_of(*args: object, **options: object) -> object:
        found = real(*args, **options)
        monkeypatch.setattr(interrupts._Waiting, "deliver", count)
        return found

    def count(_: object) -> None:
        looked.append(1)

    real = api.requests_of
    looked = list[int]()
    monkeypatch.setattr(api, "requests_of", requests_of)
    assert llmctl(f"simulate --trace bursty-small {words}") == 0
    assert len(looked) > 3  # one is after `requests_of`, one at the end
    capsys.readouterr()


def test_the_first_raises_and_the_second_ends_the_process(handler, monkeypatch):
    handler()
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with pytest.raises(interrupts.InterruptedByUserError):
        press()
    assert codes == []
    with pytest.raises(interrupts.InterruptedByUserError):  # in place of the end
        press()
    assert codes == [EXIT_CODE]


def test_an_import_ends_before_the_signal_is_raised(handler, tmp_path, monkeypatch):
    name = "interrupted_while_imported"
    text = "import signal\nsignal.raise_signal(signal.SIGINT)\nloaded = True\n"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    handler()

    def work() -> None:
        __import__(name)
        threading.Event().wait(10)

    with pytest.raises(interrupts.InterruptedByUserError):
        work()
    assert sys.modules.pop(name).loaded


def test_a_destructor_does_not_lose_the_signal(handler, monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)

    class Pressing:
        def __del__(self) -> None:
            press()

    def work() -> None:
        pressing = Pressing()
        del pressing
        threading.Event().wait(10)

    handler()
    with pytest.raises(interrupts.InterruptedByUserError):
        work()


def test_an_import_that_does_not_end_is_interrupted(handler, tmp_path, monkeypatch):
    name = "interrupted_while_it_waits"
    (tmp_path / f"{name}.py").write_text("import threading\nthreading.Event().wait(10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(interrupts, "PATIENCE_S", 0.0)
    handler()
    signal.signal(signal.SIGALRM, lambda *_: press())
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with pytest.raises(interrupts.InterruptedByUserError):
        __import__(name)


def test_an_error_that_follows_the_signal_is_an_interrupt(handler, monkeypatch, capsys):
    def failing() -> None:
        try:
            press()
        except KeyboardInterrupt:
            raise ImportError("half imported") from None

    module = ModuleType("toolkit.cli.listings")
    module.command = failing
    monkeypatch.setitem(sys.modules, "toolkit.cli.listings", module)
    monkeypatch.setattr(interrupts, "_command_line", handler())
    err = ran(capsys, "schema", code=EXIT_CODE).err
    assert len(err.splitlines()) == 2  # the line of ^C, and one


@pytest.mark.slow
def test_a_process_ends_with_130_and_one_line():
    words = "--fit tiny-llama-cpu --trace chat-small --policy slice --set slice_tokens=1"
    line = [sys.executable, "-m", "toolkit", "simulate", *words.split()]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stderr.readline()  # the trace is read, and the simulation follows
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == EXIT_CODE
    assert "Traceback" not in rest
    assert "interrupted" in rest.splitlines()[-1]


@pytest.mark.slow
def test_an_alarm_does_not_kill_python_s_end():
    """The alarm of a signal that came within a destructor, just before the command's end."""
    program = """
import atexit, signal
last = lambda: print([signal.getsignal(one).name for one in (signal.SIGINT, signal.SIGALRM)])
atexit.register(last)  # what is registered first runs last
from toolkit import interrupts
interrupts.catch()
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert shown.stdout == "['SIG_IGN', 'SIG_IGN']\n"


@pytest.mark.parametrize(("ends", "code"), [("0", EXIT_CODE), ("3", 3)])
def test_a_server_that_ctrl_c_has_drained_ends_with_130(monkeypatch, handler, ends, code):
    """Its own handler notes Ctrl-C; an error of the server's stays its exit code."""

    def run() -> None:
        interrupts.note()
        sys.exit(int(ends))

    monkeypatch.setattr(interrupts, "_command_line", handler())
    monkeypatch.setattr(command_line, "run", run)
    with pytest.raises(SystemExit) as ended:
        entry_point()
    assert ended.value.code == code


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], threading.Event]:
    """The exit codes with which the process would have ended at once, and that one has come."""
    codes: list[int] = []
    came = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        came.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(interrupts, "MOST_HELD_S", 0.0)
    return codes, came


def test_a_simulation_that_does_not_look_for_the_signal_ends_nevertheless(
    handler, monkeypatch, capsys, ended
):
    codes, came = ended
    monkeypatch.setattr(interrupts, "_command_line", handler())
    interrupts.leaves("trials are kept")

    def work() -> None:
        with held(writes=False):
            press()
            assert came.wait(60)
            assert codes == [EXIT_CODE]
            assert capsys.readouterr().err == "\ninterrupted; trials are kept\n"

    with pytest.raises(interrupts.InterruptedByUserError):  # `_exit` is not the real one
        work()


def test_a_second_signal_ends_a_simulation_at_once(handler, ended, monkeypatch):
    codes, _ = ended
    monkeypatch.setattr(interrupts, "MOST_HELD_S", 60.0)
    handler()

    def work() -> None:
        with held(writes=False):
            press()
            assert codes == []
            press()
            assert codes == [EXIT_CODE]

    with pytest.raises(interrupts.InterruptedByUserError):
        work()


@pytest.mark.parametrize("inside", [False, True])
def test_what_writes_reaches_its_end(handler, ended, inside):
    """Also where it simulates: what it has by then is written."""
    codes, came = ended
    handler()

    def work() -> None:
        with held(), held(writes=not inside):
            press()
            press()
            assert not came.wait(0.1)

    with pytest.raises(interrupts.InterruptedByUserError):
        work()
    assert codes == []


STUCK = """
import signal, sys, threading
from toolkit import __main__, interrupts
from toolkit.cli import main
def run():
    {work}
main.run = run
interrupts.leaves("nothing is kept")
__main__.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        # a thread that never ends, as of a pool after the kill of its process
        "threading.Thread(target=threading.Event().wait).start(); "
        "signal.raise_signal(signal.SIGINT)",
        # a simulation that never looks
        "interrupts.held(writes=False).__enter__(); signal.raise_signal(signal.SIGINT)\n"
        "    while True: pass",
    ],
)
def test_a_process_that_would_not_end_does(work):
    line = [sys.executable, "-c", STUCK.format(work=work)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == EXIT_CODE
    assert done.stderr == "\ninterrupted; nothing is kept\n"
