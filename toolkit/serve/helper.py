"""A process beside the server that reads large bodies, so that none stops the server's event loop.

Parsing holds Python's lock from a body's first byte to its last, in a thread as well. So a body of more than
`LARGE_BODY_BYTES` is sent to the helper, which parses and checks it and turns its text into tokens; the server gets the
form and the tokens, or the error. Bodies are read one after the other.

The helper ends when its standard input does: also when the server is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import pickle
import signal
import struct
import sys
from array import array
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.recipe import ModelSpec
from toolkit.serve.errors import ApiError
from toolkit.serve.prompts import BodyReader

LARGE_BODY_BYTES = 1 << 15
MAX_WAITING_BODIES = 64
READING_TIMEOUT_S = 60.0  # for one body
RETRY_AFTER_S = 5
PIPE_BYTES = 1 << 18
TRIM_BYTES = 1 << 20  # after a body of this size memory goes back to the system

ReadLarge = Callable[[str, bytes], Awaitable[Any]]  # a method of `BodyReader` and the body, to what it returns


def in_thread(reader: BodyReader) -> ReadLarge:
    """Without a helper: the same in a thread, which holds others up while it parses."""

    async def read(kind: str, body: bytes) -> Any:
        return await asyncio.to_thread(getattr(reader, kind), body)

    return read


class Helper:
    """The process, as the server sees it. It is started again when it has died."""

    def __init__(self, model: ModelSpec, vocab_size: int, max_model_len: int) -> None:
        self._begin = pickle.dumps((model.model_dump_json(), vocab_size, max_model_len))
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def start(self) -> None:
        command = (sys.executable, "-m", "toolkit.serve.helper")
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=PIPE_BYTES)
        assert self._process.stdin
        self._process.stdin.write(_framed(self._begin))

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def __call__(self, kind: str, body: bytes) -> Any:
        """What `BodyReader`'s method `kind` makes of the body, prompts as tuples. `ApiError` as there."""
        if self._waiting >= MAX_WAITING_BODIES:
            text = f"{self._waiting} large bodies wait to be read; try again later"
            raise ApiError(text, status=503, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)})
        self._waiting += 1
        try:
            async with self._turn:
                reply = await self._ask(pickle.dumps((kind, body)))
        finally:
            self._waiting -= 1
        if isinstance(reply, ApiError):
            raise reply
        if isinstance(reply, bytes):
            return reply
        form, prompts = reply
        tuples = []
        for prompt in prompts:
            tuples.append(tuple(prompt))
            await asyncio.sleep(0)  # all of them at once may be millions of tokens
        return form, tuples

    async def _ask(self, frame: bytes) -> Any:
        try:
            if self._process is None:
                await self.start()
            assert self._process
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin
            assert stdout
            async with asyncio.timeout(READING_TIMEOUT_S):
                stdin.write(_framed(frame))
                await stdin.drain()
                size, pickled = _HEAD.unpack(await stdout.readexactly(_HEAD.size))
                found = await stdout.readexactly(size)
            await asyncio.sleep(0)  # a large answer was copied just now: others first
            return pickle.loads(found) if pickled else found
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            await self.stop()
            text = "the request failed: its body could not be read"
            headers = {"x-should-retry": "false"}
            raise ApiError(text, status=503, code="request_failed", headers=headers) from None
        except asyncio.CancelledError:
            await self.stop()  # its answer would be taken for the next one's
            raise


_HEAD = struct.Struct("<Q?")  # a frame's size, and whether it is pickled


def _framed(data: bytes, *, pickled: bool = True) -> bytes:
    return _HEAD.pack(len(data), pickled) + data


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None when there is no next one."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, _ = _HEAD.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None


def _worked(reader: BodyReader, kind: str, body: bytes) -> bytes:
    """The frame of the answer."""
    try:
        found = getattr(reader, kind)(body)
    except ApiError as error:
        return _framed(pickle.dumps(error))
    if isinstance(found, bytes):
        return _framed(found, pickled=False)
    form, prompts = found
    return _framed(pickle.dumps((form, [array("q", prompt) for prompt in prompts])))


def main() -> None:
    """The helper's own life. Only the server's end ends it, since what the server has read is to be answered."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    begin = _read(pipe)
    if begin is None:
        return
    model, vocab_size, max_model_len = pickle.loads(begin)
    reader = BodyReader(load_tokenizer(ModelSpec.model_validate_json(model)), vocab_size, max_model_len)
    while (frame := _read(pipe)) is not None:
        kind, body = pickle.loads(frame)
        answers.write(_worked(reader, kind, body))
        answers.flush()
        if len(body) > TRIM_BYTES:
            del frame, body
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
