"""Frames are read however the stream is cut, and a child reports as often as it should."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.protocol import (
    EnginePass,
    FinishReason,
    PassOutput,
    Row,
    SamplingParams,
    StepOutput,
    slice_of,
)
from toolkit.processes.channel import MAX_FRAME_BYTES, FrameCutter, pack
from toolkit.workers.child import RunningPass
from toolkit.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    Cancel,
    Interrupt,
    PassDone,
    PassProgress,
    Ready,
    Refused,
    Start,
    Stop,
    ToWorker,
)

SAMPLED = SamplingParams(temperature=0.5, seed=-3, stop_token_ids=(1, 2))
SENT = [
    Start("{}"),
    slice_of((Row("a", (1, 2, 70_000), 1, 9, SAMPLED, 4), Row("b", (), 0, 1)), 32, 7),
    Cancel(7, (0,)),
    Stop(),
]
STEP = StepOutput((0, 1), (65, 66), ((1, "length"),))
ANSWERED = [
    Ready("{}"),
    PassProgress(-1, 7, (STEP, STEP)),
    PassDone(-1, 7, PassOutput(3, ended=(1,), dropped=(0,), ran_out=1), "oom"),
    Refused("no", "try"),
]


@given(st.lists(st.integers(1, 40)))
def test_frames_are_read_however_the_stream_is_cut(sizes: list[int]) -> None:
    stream = b"".join(map(pack, SENT))
    cutter = FrameCutter()
    bodies: list[bytes] = []
    for size in sizes:
        piece = stream[:size]
        stream = stream[size:]
        bodies += cutter.feed(piece)
    bodies += cutter.feed(stream)
    assert list(map(TO_WORKER.decode, bodies)) == SENT


def test_the_front_reads_the_frames_of_workers() -> None:
    bodies = FrameCutter().feed(b"".join(map(pack, ANSWERED)))
    assert list(map(FROM_WORKER.decode, bodies)) == ANSWERED


@pytest.mark.parametrize(
    "data",
    [
        pack(Ready("{}")),  # a frame to the front
        b"\x00\x00\x00\x02hi",
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        pack(Cancel(1, (0,))).replace(b"cancel", b"banana"),
    ],
)
def test_an_invalid_frame_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        list(map(TO_WORKER.decode, FrameCutter().feed(data)))


class FakeChannel:
    """Keeps the frames that a child sends, and gives it frames from the front."""

    def __init__(self) -> None:
        self.sent: list[PassProgress] = []
        self.inbox: list[ToWorker] = []

    def send(self, frame: PassProgress) -> None:
        self.sent.append(frame)

    def poll(self, _: object) -> list[ToWorker]:
        frames = self.inbox
        self.inbox = []
        return frames


class Slice:
    """A running slice of two rows on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.channel = FakeChannel()
        run = slice_of((Row("a", (1,), 0, 9), Row("b", (2,), 0, 9)), 9, 3)
        self.running = RunningPass(self.channel, 0.05, lambda: self.now_s)  # type: ignore[arg-type]
        self.running.begin(run)

    def step(self, at_s: float, ended: Sequence[tuple[int, FinishReason]] = ()) -> bool:
        self.now_s = at_s
        return self.running.on_step(StepOutput((0, 1), (5, 6), tuple(ended)))

    @property
    def sent_steps(self) -> list[int]:
        return [len(frame.steps) for frame in self.channel.sent if isinstance(frame, PassProgress)]


def test_the_first_step_is_sent_at_once_and_later_steps_together() -> None:
    running = Slice()
    for at_s in (100.0, 100.01, 100.02, 100.06, 100.07, 100.08):
        assert running.step(at_s)
    assert running.sent_steps == [1, 3]
    running.running.end(PassOutput(6))
    assert running.sent_steps == [1, 3, 2]


def test_the_end_of_a_row_is_sent_with_later_steps_too() -> None:
    running = Slice()
    running.step(100.0)
    running.step(100.01, ended=[(1, "stop")])
    assert running.sent_steps == [1]
    running.step(100.06)
    assert running.sent_steps == [1, 2]


def test_a_batch_goes_on_while_one_row_is_wanted() -> None:
    running = Slice()
    running.channel.inbox = [Cancel(2, (0, 1)), Cancel(3, (0,))]  # the first is another's
    assert running.step(100.0)
    assert not running.step(100.01, ended=[(1, "stop")])  # the other row has ended


def test_stop_ends_the_slice_and_then_the_worker() -> None:
    running = Slice()
    running.channel.inbox = [Stop()]
    assert not running.step(100.0)
    assert running.running.stops


def kept_pass(channel: FakeChannel) -> RunningPass:
    """A running pass that keeps its caches."""
    running = RunningPass(channel, 0.05, lambda: 100.0)  # type: ignore[arg-type]
    running.begin(EnginePass(9, pass_id=3))
    return running


def test_a_pass_that_keeps_caches_goes_on_until_it_is_interrupted() -> None:
    channel = FakeChannel()
    running = kept_pass(channel)
    assert running.on_step(StepOutput((7,), (5,)))
    channel.inbox = [Interrupt(2), Interrupt(3)]
    assert not running.on_step(StepOutput((7,), (6,)))


def test_a_newcomer_s_first_token_is_sent_at_once() -> None:
    channel = FakeChannel()
    running = kept_pass(channel)
    running.begin(EnginePass(9, numbers=(7, 8), pass_id=3))
    for rows in ((7,), (8,), (7, 8)):  # two groups are prefilled, then all decode
        running.on_step(StepOutput(rows, rows))
    assert [len(frame.steps) for frame in channel.sent] == [1, 1]
    running.begin(EnginePass(9, pass_id=4))
    running.on_step(StepOutput((7, 8), (5, 6)))
    running.end(PassOutput(2))
    progress, done = channel.sent[-2:]
    assert len(progress.steps) == 2
    assert isinstance(done, PassDone)


def test_a_newcomer_may_get_its_first_token_in_a_later_pass() -> None:
    channel = FakeChannel()
    running = kept_pass(channel)
    running.begin(EnginePass(9, numbers=(7, 8), pass_id=3))
    running.on_step(StepOutput((7,), (5,)))
    running.begin(EnginePass(9, evict=(7,), pass_id=4))
    running.on_step(StepOutput((8,), (5,)))
    assert [len(frame.steps) for frame in channel.sent] == [1, 1]
