"""Ctrl-C: where it is raised, what the simulator does then, and how a command ends."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
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
from toolkit.sim.clock import CHECK_EVERY
from toolkit.sim.world import UNIT_STEP, make_world
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

CLOCK = interrupts._end_late
VLLM = "llama-3.1-8b-h200 --policies vllm"
ROOT = Path(interrupts.__file__).parent.parent


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> interrupts._CtrlC:
    fresh = interrupts._CtrlC()
    monkeypatch.setattr(interrupts, "_ctrl_c", fresh)
    return fresh


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[int], threading.Event]]:
    """Ctrl-C is a command's: the exit codes with which the process would have ended, and that one
    has come.
    """
    codes: list[int] = []
    came = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        came.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(interrupts, "_end_late", lambda: None)
    before = signal.signal(signal.SIGINT, interrupts._of_command)
    yield codes, came
    signal.signal(signal.SIGINT, before)


def test_a_signal_in_held_work_comes_at_its_end():
    done = []

    def work() -> None:
        with held():
            press()
            check()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        press()


def test_a_check_lets_the_signal_in():
    done = []

    def work() -> None:
        with held(writes=False):
            check()
            press()
            check()
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not done


@pytest.mark.parametrize("outer", [True, False])
def test_what_writes_holds_the_checks_within_it_and_around_it(outer: bool):
    done = []

    def work() -> None:
        with held(writes=outer):
            with held(writes=not outer):
                press()
                check()
                done.append(1)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert len(done) == 2


def test_another_thread_takes_no_signal_of_the_main_one():
    ended = []

    def other() -> None:
        with held(writes=False):
            check()
        ended.append(1)

    def work() -> None:
        with held(writes=False):
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
        f"{UNIT_STEP} --policies fcfs",
        VLLM,
        f"{VLLM} --workers 2 --set replica_router=sglang",
    ],
)
def test_every_loop_of_the_simulator_looks_for_the_signal(words, monkeypatch, capsys):
    from toolkit.sim import api

    def requests_of(*args: object, **options: object) -> object:
        found = real(*args, **options)
        monkeypatch.setattr(interrupts, "_deliver", lambda: looked.append(1))
        return found

    real = api.requests_of
    looked = list[int]()
    monkeypatch.setattr(api, "requests_of", requests_of)
    assert llmctl(f"simulate {words} --trace bursty-small") == 0
    assert len(looked) > 3  # one is after `requests_of`, one at the end
    capsys.readouterr()


def test_the_first_raises_and_the_second_ends_the_process(ended):
    codes, _ = ended
    with pytest.raises(interrupts.InterruptedByUserError):
        press()
    assert codes == []
    with pytest.raises(interrupts.InterruptedByUserError):  # `_exit` is not the real one
        press()
    assert codes == [EXIT_CODE]


def test_an_error_that_follows_the_signal_is_an_interrupt(ended, monkeypatch, capsys):
    def failing() -> None:
        try:
            press()
        except KeyboardInterrupt:
            raise ImportError("half imported") from None

    module = ModuleType("toolkit.cli.listings")
    module.command = failing
    monkeypatch.setitem(sys.modules, "toolkit.cli.listings", module)
    err = ran(capsys, "doctor", code=EXIT_CODE).err
    assert len(err.splitlines()) == 2  # the line of ^C, and one


@pytest.mark.parametrize(("ends", "code"), [("0", EXIT_CODE), ("3", 3)])
def test_a_server_that_ctrl_c_has_drained_ends_with_130(monkeypatch, ends, code):
    """Its own handler notes Ctrl-C; an error of the server's stays its exit code."""

    def run() -> None:
        interrupts.note()
        sys.exit(int(ends))

    monkeypatch.setattr(interrupts, "catch", lambda: None)
    monkeypatch.setattr(command_line, "run", run)
    with pytest.raises(SystemExit) as stopped:
        entry_point()
    assert stopped.value.code == code


def test_work_that_does_not_look_for_the_signal_ends_nevertheless(
    ctrl_c, ended, monkeypatch, capsys
):
    codes, came = ended
    monkeypatch.setattr(interrupts, "MOST_S", 0.0)
    monkeypatch.setattr(interrupts, "_end_late", CLOCK)
    ctrl_c.leaves = "trials are kept"

    def work() -> None:
        with held(writes=False):
            press()
            assert came.wait(60)
            assert codes == [EXIT_CODE]
            assert capsys.readouterr().err == "\ninterrupted; trials are kept\n"

    with pytest.raises(interrupts.InterruptedByUserError):  # `_exit` is not the real one
        work()


def test_a_second_signal_ends_a_simulation_at_once(ended):
    codes, _ = ended

    def work() -> None:
        with held(writes=False):
            press()
            assert codes == []
            press()
            assert codes == [EXIT_CODE]

    with pytest.raises(interrupts.InterruptedByUserError):
        work()


@pytest.mark.parametrize("inside", [False, True])
def test_what_writes_reaches_its_end(ended, monkeypatch, inside):
    """Also where it simulates: what it has by then is written."""
    codes, came = ended
    monkeypatch.setattr(interrupts, "MOST_S", 0.01)
    monkeypatch.setattr(interrupts, "_end_late", CLOCK)
    left = []

    def work() -> None:
        with held(), held(writes=not inside):
            press()
            press()
            left.append(came.wait(0.1))

    with pytest.raises(interrupts.InterruptedByUserError):
        work()
    assert left == [False]
    assert came.wait(60)  # the clock has waited
    assert codes == [EXIT_CODE]


@pytest.mark.slow
def test_a_process_ends_with_130_and_one_line():
    words = "tiny-llama-cpu --trace chat-small --policies slice --set slice_tokens=1"
    line = [sys.executable, "-m", "toolkit", "simulate", *words.split()]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        process.stderr.readline()  # the trace is read, and the simulation follows
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == EXIT_CODE
    assert "Traceback" not in rest
    assert "interrupted" in rest.splitlines()[-1]


STUCK = """
import signal, sys, threading
from toolkit import __main__, interrupts
from toolkit.cli import main
class Lost:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
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
        # Python loses the exception in a destructor
        "Lost()\n    threading.Event().wait()",
    ],
)
def test_a_process_that_would_not_end_does(work):
    line = [sys.executable, "-c", STUCK.format(work=work)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert done.returncode == EXIT_CODE
    assert done.stderr == "\ninterrupted; nothing is kept\n"
