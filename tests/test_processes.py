"""Children as their parent sees them: last words, ends, what they leave, closed channels."""

import asyncio
import socket
import sys
import time
from contextlib import suppress

import msgspec
import psutil
import pytest

from toolkit.errors import EngineError
from toolkit.processes.channel import Alive, Channel, ChannelClosedError
from toolkit.processes.child import LINE_BYTES, WORDS_CHARACTERS, Child
from toolkit.processes.supervisor import Supervisor

pytestmark = pytest.mark.slow  # most tests start processes

END_S = 60.0
SLEEPS = "import time; time.sleep(600)"
FAILS = """
import sys
print("ValueError: a first error, which was caught")
try:
    raise KeyError("the cause")
finally:
    print("a last line that says nothing", file=sys.stderr)
    sys.stderr.flush()
"""
LEAVES = f"""
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "{SLEEPS}"])
print(left.pid)
"""
WRITES = """
import socket, sys
from toolkit.processes.channel import Alive
from toolkit.processes.lifeline import channel_to_parent
channel_to_parent().send(Alive())
"""
FRAMES = msgspec.msgpack.Decoder(Alive)


def python(program: str, **options: object) -> Child:
    return Child((sys.executable, "-c", program), **options)


@pytest.mark.parametrize(
    ("program", "how"),
    [
        (FAILS, "exit code 1: KeyError: 'the cause'"),
        ("print('no words about the end')", "exit code 0: no words about the end"),
        ("", "exit code 0"),
        ("import sys; sys.exit('it is refused')", "exit code 1: it is refused"),
        ("import os; print('words'); os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; print('words', flush=True); os.abort()", "killed by SIGABRT: words"),
    ],
)
def test_how_a_child_ended_is_told_with_its_last_words_about_an_error(program: str, how: str):
    child = python(program)
    assert child.end(END_S) == how
    assert not child.running


def test_an_endless_line_is_kept_in_part():
    child = python(f"print('x' * {LINE_BYTES * 1000})")
    assert child.end(END_S) == f"exit code 0: {'x' * WORDS_CHARACTERS}"
    assert sum(map(len, child._tail)) <= LINE_BYTES * child._tail.maxlen


def test_what_a_child_shows_is_printed(capsys: pytest.CaptureFixture[str]):
    assert python("print('shown')", shows=True).end(END_S)
    assert python("print('not shown')").end(END_S)
    assert capsys.readouterr().err == "shown\n"


@pytest.mark.parametrize("rest_s", [0.0, 60.0])
def test_what_a_child_leaves_of_its_group_ends_with_it(rest_s: float):
    child = python(LEAVES)
    pid = int(child.end(END_S, rest_s).split()[-1])
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(pid)
        deadline_s = time.monotonic() + END_S
        while left.status() != psutil.STATUS_ZOMBIE:  # process 1 has not reaped it yet
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_a_child_ends_with_its_block():
    with python(SLEEPS) as child:
        assert child.wait(0.0) is None
        assert child.running
    assert child.ended_by() == "killed by SIGKILL"


def test_a_program_that_is_not_there_closes_the_socket_that_it_was_to_get():
    ours, theirs = socket.socketpair()
    with ours, pytest.raises(FileNotFoundError):
        Child(("/no/such/program",), gives=theirs)
    assert theirs.fileno() == -1


def test_a_channel_has_the_frames_and_then_the_end():
    ours, theirs = socket.socketpair()
    child = python(WRITES, gives=theirs)
    channel = Channel(ours)
    assert channel.receive(FRAMES) == Alive()
    for use in (lambda: channel.receive(FRAMES), lambda: channel.poll(FRAMES)):
        with pytest.raises(ChannelClosedError):
            use()
    with pytest.raises(ChannelClosedError):
        channel.send(Alive())
    channel.close()
    assert child.end(END_S) == "exit code 0"


class Failing(Supervisor):
    """Children that start, and end with an error that no one foresaw."""

    called = "thing"

    def __init__(self) -> None:
        super().__init__(1)
        self.lives = 0
        self.is_over = asyncio.Event()

    async def live(self, number: int) -> str:
        self.lives += 1
        if self.lives < 3:
            self.ready(number)
        raise ZeroDivisionError("a bug")

    def ended(self, number: int, error: EngineError) -> bool:
        self.reason = error.message
        if self.lives == 3:
            self.is_over.set()
        return not self.is_over.is_set()


def test_a_bug_in_a_life_is_told_and_the_child_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("toolkit.processes.supervisor.PAUSE_S", 0.0)

    async def main() -> Failing:
        things = Failing()
        await things.start_children()
        await asyncio.wait_for(things.is_over.wait(), 60)
        await things.end_children()
        return things

    things = asyncio.run(main())
    assert things.reason == "ZeroDivisionError: a bug"
    assert sum(record.exc_info is not None for record in caplog.records) == things.lives == 3


class Coming(Supervisor):
    """Children that come and go; the one with number 1 never starts."""

    def __init__(self) -> None:
        super().__init__(1)
        self.lives: list[int] = []

    async def live(self, number: int) -> str:
        self.lives.append(number)
        if number != 1:
            self.ready(number)
            while not self.children[number].is_retired:
                await asyncio.sleep(0)
            return "it was retired"
        await asyncio.Event().wait()
        return ""


def test_further_children_come_and_go_and_their_places_are_taken_again():
    async def main() -> list[int]:
        things = Coming()
        await things.start_children()
        for number in (1, 2):
            things.start_child(number)
        await things.children[2].first
        for number in (1, 2):
            things.retire(number)
            while not things.is_over(number):
                await asyncio.sleep(0)
        things.start_child(2)
        await things.children[2].first
        assert not things.is_over(0)
        assert things.children[0].is_ready
        await things.end_children()
        return things.lives

    assert asyncio.run(main()) == [0, 1, 2, 2]
