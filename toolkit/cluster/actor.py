"""What runs on a machine of the cluster: a worker's loop as an actor, which hears and says frames as bytes.

The loop is that of a worker's process (`toolkit.workers.child`). Ray calls methods on threads of their own, in whatever
order; frames are numbered, and come in theirs. A batch is one call whose frames stream back as the worker sends them,
a few per second and not one per token.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from toolkit.workers.child import serve
from toolkit.workers.frames import Alive, FromWorker, Progress, ToWorker, pack, worker_side
from toolkit.workers.lifeline import Signs

THREADS = 4  # the loop, a batch's call, the end of the call before, and what is told meanwhile


class QueueChannel:
    """`toolkit.workers.channel.Channel` between threads. Ray ends the actor whose front is gone."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._outbox: SimpleQueue[FromWorker] = SimpleQueue()
        self._put_back: deque[ToWorker] = deque()
        self._early: dict[int, ToWorker] = {}
        self._next = 0
        self._lock = threading.Lock()

    def deliver(self, number: int, frame: ToWorker) -> None:
        """A frame from the front, which counts them from 0; one whose predecessors are not here yet waits for them."""
        with self._lock:
            self._early[number] = frame
            while self._next in self._early:
                self._inbox.put(self._early.pop(self._next))
                self._next += 1

    def take(self) -> FromWorker:
        """The next frame for the front, waiting for it."""
        return self._outbox.get()

    def send(self, frame: FromWorker) -> None:
        self._outbox.put(frame)

    def receive(self) -> ToWorker:
        return self._put_back.popleft() if self._put_back else self._inbox.get()

    def poll(self) -> list[ToWorker]:
        frames = list(self._put_back)
        self._put_back.clear()
        try:
            while True:
                frames.append(self._inbox.get_nowait())
        except Empty:
            return frames

    def put_back(self, frame: ToWorker) -> None:
        self._put_back.appendleft(frame)


class WorkerActor:
    """A worker, as Ray makes one. Frames cross as bytes, each with its length before it."""

    def __init__(self) -> None:
        self._channel = QueueChannel()

    def live(self) -> int:
        """Serve until told to stop, and return the exit code; a bug of the engine is raised."""
        return serve(self._channel, Signs(lambda: self._channel.send(Alive()), idle=False))

    def tell(self, number: int, data: bytes) -> None:
        """A frame that needs no answer."""
        for frame in worker_side().feed(data):
            self._channel.deliver(number, frame)

    def ask(self, number: int, data: bytes) -> Iterator[bytes]:
        """A frame that is answered: progress as it comes, and then what ends it."""
        self.tell(number, data)
        while True:
            frame = self._channel.take()
            yield pack(frame)
            if not isinstance(frame, Progress | Alive):
                return
