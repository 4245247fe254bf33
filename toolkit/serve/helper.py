"""A process that reads large bodies, so that they do not block the event loop of the server.

Parsing holds Python's global lock from a body's first byte to its last, also in a thread. So the
server sends a body of more than `LARGE_BODY_BYTES` to its `Helper`, which parses and checks it and
turns its text into tokens. The server gets the form and the tokens, or the error. The process reads
one body after the other. It ends when its standard input ends, and `toolkit.guard` ends it with the
server, also when the server is killed.
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
from typing import Any, BinaryIO

import msgspec

from toolkit import guard
from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.recipe import ModelSpec
from toolkit.serve.errors import ApiError, overloaded
from toolkit.serve.forms import FORMS, BodyReader

LARGE_BODY_BYTES = 1 << 15
MAX_WAITING_BODIES = 64
READING_TIMEOUT_S = 60.0  # for one body
PIPE_BYTES = 1 << 18
TRIM_BYTES = 1 << 20  # after a larger body the process returns memory to the system

# As `BodyReader.read`, without blocking the event loop.
ReadLarge = Callable[[str, bytes], Awaitable[Any]]
# From the kind of a job and its body to the answer. Raises `ApiError`.
ReadBody = Callable[[str, bytes], bytes]

# Messages, in msgpack.
_Begin = tuple[str, int, int]  # the `ModelSpec` as JSON, its vocab_size and max_model_len
_Job = tuple[str, bytes]  # its kind, and the body
_Refusal = tuple[str, int, str | None, str | None]  # message, status, param, code of an `ApiError`
_Read = tuple[bytes, list[bytes]]  # a form as JSON, and each prompt's tokens in eight bytes each
_HEAD = struct.Struct("<Q?")  # of each message: its size, and whether it is a `_Refusal`


class ReadingProcess:
    """The process, seen from the server. It starts with the first body, and again if it has died.

    It runs `module`, which has to call `work`, and first gets the message `begin`.
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
        process = self._process
        self._process = None
        if process:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            guard.forget(process.pid)

    async def ask(self, kind: str, body: bytes) -> bytes:
        """The answer. Raises `ApiError` if it is a refusal, or the process is busy or dead."""
        if self._waiting >= MAX_WAITING_BODIES:
            raise overloaded(f"{self._waiting} large bodies wait to be read; try again later")
        self._waiting += 1
        try:
            async with self._turn:
                answer, refused = await self._exchange(msgspec.msgpack.encode((kind, body)))
        finally:
            self._waiting -= 1
        if refused:
            message, status, param, code = msgspec.msgpack.decode(answer, type=_Refusal)
            raise ApiError(message, status=status, param=param, code=code)
        return answer

    async def _exchange(self, job: bytes) -> tuple[bytes, bool]:
        try:
            if self._process is None or self._process.returncode is not None:
                await self.start()
            assert self._process
            stdin = self._process.stdin
            stdout = self._process.stdout
            assert stdin
            assert stdout
            async with asyncio.timeout(READING_TIMEOUT_S):
                stdin.write(_framed(job))
                await stdin.drain()
                size, refused = _HEAD.unpack(await stdout.readexactly(_HEAD.size))
                answer = await stdout.readexactly(size)
            await asyncio.sleep(0)  # copying a large answer took time: serve other tasks first
            return answer, refused
        # RuntimeError: uvloop's, for a closed pipe.
        except (OSError, RuntimeError, asyncio.IncompleteReadError, TimeoutError):
            await self.stop()
            text = "the request failed: its body could not be read"
            headers = {"x-should-retry": "false"}
            raise ApiError(text, status=503, code="request_failed", headers=headers) from None
        except asyncio.CancelledError:
            await self.stop()  # otherwise the next body would get this one's answer
            raise


class Helper(ReadingProcess):
    """The server's process: it parses and checks bodies, and turns text into tokens."""

    def __init__(self, model: ModelSpec, vocab_size: int, max_model_len: int) -> None:
        begin: _Begin = (model.model_dump_json(), vocab_size, max_model_len)
        super().__init__("toolkit.serve.helper", msgspec.msgpack.encode(begin))

    async def __call__(self, kind: str, body: bytes) -> Any:
        """The result of `BodyReader.read`, with prompts as tuples. Raises `ApiError` as it does."""
        answer = await self.ask(kind, body)
        if kind not in FORMS:
            return answer
        form_json, prompts_of_bytes = msgspec.msgpack.decode(answer, type=_Read)
        form = FORMS[kind].model_validate_json(form_json)
        prompts = []
        for data in prompts_of_bytes:
            prompts.append(tuple(array("q", data)))
            await asyncio.sleep(0)  # all prompts together may have millions of tokens
        return form, prompts


def _framed(data: bytes, *, refused: bool = False) -> bytes:
    return _HEAD.pack(len(data), refused) + data


def _read_frame(pipe: BinaryIO) -> bytes | None:
    """The next frame, or None at the end."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size, _ = _HEAD.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None


def work(prepare: Callable[[bytes], ReadBody]) -> None:
    """Answer the frames on standard input until it ends.

    `prepare` gets the first message, and returns what reads each body. Signals are ignored: only
    the end of the server ends the process, because accepted requests still get answers.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pipe = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write among the answers
    with contextlib.suppress(BrokenPipeError):
        begin = _read_frame(pipe)
        if begin is None:
            return
        read_body = prepare(begin)
        while (frame := _read_frame(pipe)) is not None:
            kind, body = msgspec.msgpack.decode(frame, type=_Job)
            refused = False
            try:
                answer = read_body(kind, body)
            except ApiError as error:
                refusal: _Refusal = (error.message, error.status, error.param, error.code)
                answer = msgspec.msgpack.encode(refusal)
                refused = True
            answers.write(_framed(answer, refused=refused))
            answers.flush()
            if len(frame) > TRIM_BYTES:
                del frame, body, answer
                gc.collect()
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)


def _prepare(begin: bytes) -> ReadBody:
    model, vocab_size, max_model_len = msgspec.msgpack.decode(begin, type=_Begin)
    tokenizer = load_tokenizer(ModelSpec.model_validate_json(model))
    reader = BodyReader(tokenizer, vocab_size, max_model_len)

    def read_body(kind: str, body: bytes) -> bytes:
        result = reader.read(kind, body)
        if isinstance(result, bytes):
            return result
        form, prompts = result
        tokens = [array("q", prompt).tobytes() for prompt in prompts]
        read: _Read = (form.model_dump_json(exclude_none=True).encode(), tokens)
        return msgspec.msgpack.encode(read)

    return read_body


if __name__ == "__main__":
    work(_prepare)
