"""A process beside the server that reads large bodies, so that none stops the server's event loop.

The recorder has one of its own (`recorder/large.py`).

Parsing holds Python's lock from a body's first byte to its last, in a thread as well. So a body of
more than `LARGE_BODY_BYTES` is sent to the helper, which parses and checks it and turns its text
into tokens; the server gets the form and the tokens, or the error. Bodies are read one after the
other.

The helper ends when its standard input does, and `toolkit.guard` ends it with the server: also when
that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import struct
import sys
from array import array
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, BinaryIO

import msgspec

from toolkit import guard
from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.recipe import ModelSpec
from toolkit.serve.errors import ApiError
from toolkit.serve.forms import BodyReader, ChatForm, CompletionForm

LARGE_BODY_BYTES = 1 << 15
MAX_WAITING_BODIES = 64
READING_TIMEOUT_S = 60.0  # for one body
RETRY_AFTER_S = 5
PIPE_BYTES = 1 << 18
TRIM_BYTES = 1 << 20  # after a body of this size memory goes back to the system

ReadLarge = Callable[
    [str, bytes], Awaitable[Any]
]  # a method of `BodyReader` and the body, to what it returns


def in_thread(reader: BodyReader) -> ReadLarge:
    """Without a helper: the same in a thread, which holds others up while it parses."""

    async def read(kind: str, body: bytes) -> Any:
        return await asyncio.to_thread(getattr(reader, kind), body)

    return read


class ReadingProcess:
    """The process, as the server sees it. It is started with the first body, and again when it has
    died.

    Args:
        module: what it runs, which calls `work`.
        begin: the first thing that it is told.
    """

    def __init__(self, module: str, begin: bytes) -> None:
        self._module = module
        self._begin = begin
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def start(self) -> None:
        command = (sys.executable, "-m", self._module)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=PIPE_BYTES, start_new_session=True
        )
        assert self._process.stdin
        self._process.stdin.write(_framed(self._begin))
        await asyncio.to_thread(guard.watch, self._process.pid)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            guard.forget(process.pid)

    async def ask(self, kind: str, body: bytes) -> bytes | Read:
        """What the process makes of the body. Its own `ApiError`, or one where it is busy or has
        died.
        """
        if self._waiting >= MAX_WAITING_BODIES:
            text = f"{self._waiting} large bodies wait to be read; try again later"
            raise ApiError(
                text, status=503, code="overloaded", headers={"Retry-After": str(RETRY_AFTER_S)}
            )
        self._waiting += 1
        try:
            async with self._turn:
                reply = await self._ask(_framed(msgspec.msgpack.encode(_Job(kind, body))))
        finally:
            self._waiting -= 1
        if isinstance(reply, _Refused):
            raise ApiError(reply.message, status=reply.status, param=reply.param, code=reply.code)
        return reply

    async def _ask(self, frame: bytes) -> bytes | Read | _Refused:
        try:
            if self._process is None or self._process.returncode is not None:
                await self.start()
            assert self._process
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin
            assert stdout
            async with asyncio.timeout(READING_TIMEOUT_S):
                stdin.write(frame)
                await stdin.drain()
                size, whole = _HEAD.unpack(await stdout.readexactly(_HEAD.size))
                found = await stdout.readexactly(size)
            await asyncio.sleep(0)  # a large answer was copied just now: others first
            return found if whole else msgspec.msgpack.decode(found, type=Read | _Refused)
        except (
            OSError,
            RuntimeError,
            asyncio.IncompleteReadError,
            TimeoutError,
        ):  # uvloop's of a closed pipe is the second
            await self.stop()
            text = "the request failed: its body could not be read"
            headers = {"x-should-retry": "false"}
            raise ApiError(text, status=503, code="request_failed", headers=headers) from None
        except asyncio.CancelledError:
            await self.stop()  # its answer would be taken for the next one's
            raise


class Helper(ReadingProcess):
    """The server's: it parses and checks, and turns text into tokens."""

    def __init__(self, model: ModelSpec, vocab_size: int, max_model_len: int) -> None:
        begin = _Begin(model.model_dump_json(), vocab_size, max_model_len)
        super().__init__("toolkit.serve.helper", msgspec.msgpack.encode(begin))

    async def __call__(self, kind: str, body: bytes) -> Any:
        """What `BodyReader`'s method `kind` makes of the body, prompts as tuples. `ApiError` as
        there.
        """
        reply = await self.ask(kind, body)
        if isinstance(reply, bytes):
            return reply
        form = (CompletionForm if kind == "completion" else ChatForm).model_validate_json(
            reply.form
        )
        prompts = []
        for data in reply.prompts:
            tokens = array("q")
            tokens.frombytes(data)
            prompts.append(tuple(tokens))
            await asyncio.sleep(0)  # all of them at once may be millions of tokens
        return form, prompts


class _Begin(msgspec.Struct):
    """The first thing that the server's helper is told."""

    model: str  # a `ModelSpec`, as JSON
    vocab_size: int
    max_model_len: int


class _Job(msgspec.Struct):
    kind: str
    body: bytes


class Read(msgspec.Struct, tag=True):
    """A form, as JSON, and its prompts' tokens, eight bytes each."""

    form: bytes
    prompts: list[bytes]


class _Refused(msgspec.Struct, tag=True):
    """An `ApiError`."""

    message: str
    status: int
    param: str | None
    code: str | None


Worked = Callable[
    [str, bytes], bytes | Read
]  # a job's kind and its body, to the answer; or an `ApiError`
_HEAD = struct.Struct("<Q?")  # a frame's size, and whether it is an answer's body


def _framed(data: bytes, *, whole: bool = False) -> bytes:
    return _HEAD.pack(len(data), whole) + data


def _read(pipe: BinaryIO) -> bytes | None:
    """The next frame; None when there is no next one."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, _ = _HEAD.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None


def _worked(reader: BodyReader, kind: str, body: bytes) -> bytes | Read:
    found = getattr(reader, kind)(body)
    if isinstance(found, bytes):
        return found
    form, prompts = found
    told = form.model_dump_json(exclude_none=True).encode()
    return Read(told, [array("q", prompt).tobytes() for prompt in prompts])


def _answer(worked: Worked, job: _Job) -> bytes:
    """The frame of the answer."""
    try:
        found = worked(job.kind, job.body)
    except ApiError as error:
        return _framed(
            msgspec.msgpack.encode(_Refused(error.message, error.status, error.param, error.code))
        )
    return (
        _framed(found, whole=True)
        if isinstance(found, bytes)
        else _framed(msgspec.msgpack.encode(found))
    )


def work(prepare: Callable[[bytes], Worked]) -> None:
    """A helper's own life: `prepare` gets the first thing that it is told, and returns what reads
    each body.

    Only the server's end ends it, since what the server has read is to be answered.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    with contextlib.suppress(BrokenPipeError):
        begin = _read(pipe)
        if begin is None:
            return
        worked = prepare(begin)
        while (frame := _read(pipe)) is not None:
            job = msgspec.msgpack.decode(frame, type=_Job)
            answers.write(_answer(worked, job))
            answers.flush()
            if len(frame) > TRIM_BYTES:
                del frame, job
                gc.collect()
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)


def _with_tokens(begin: bytes) -> Worked:
    told = msgspec.msgpack.decode(begin, type=_Begin)
    tokenizer = load_tokenizer(ModelSpec.model_validate_json(told.model))
    return partial(_worked, BodyReader(tokenizer, told.vocab_size, told.max_model_len))


if __name__ == "__main__":
    work(_with_tokens)
