"""The process of a profiled engine, started by `EngineProcess`: `python -m
toolkit.profiling.child`.
"""

from __future__ import annotations

import os
import select
from itertools import cycle
from typing import IO

from toolkit.engines.protocol import Engine, make_engine, slice_of
from toolkit.errors import LlmctlError
from toolkit.files.recipe import Recipe
from toolkit.profiling import process
from toolkit.workers.lifeline import end_with_front


def main() -> None:
    """Load the engine that the first frame names, then answer until the parent ends."""
    end_with_front(0)  # even if a point blocks the engine
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output must not get between two frames
    try:
        serve(requests, replies)
    except (EOFError, BrokenPipeError):
        os._exit(0)  # the parent has ended, and nothing here needs cleanup


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer the frames in `requests`. Raises `EOFError` at their end."""
    load = process.read_frame(requests, process.REQUESTS)
    assert isinstance(load, process.LoadEngine)
    recipe = Recipe.model_validate_json(load.recipe_json)
    try:
        engine = make_engine(recipe.model, recipe.engine, recipe.hardware)
    except LlmctlError as error:
        process.write_frame(replies, process.Failed(error.message, error.hint, error.exit_code))
        return
    bench = process.LocalTimedEngine(engine, recipe.profile.clock)
    process.write_frame(replies, process.Returned(bench.facts.model_dump_json()))
    while True:
        request = process.read_frame(requests, process.REQUESTS)
        if isinstance(request, process.KeepBusy):
            _keep_busy(engine, request, requests)
        else:
            process.write_frame(replies, _answer(bench, request))


def _answer(bench: process.LocalTimedEngine, request: process.Request) -> process.Reply:
    try:
        if isinstance(request, process.Time):
            return process.Returned(bench.time(request.point, request.warmups))
        if isinstance(request, process.Admit):
            return process.Returned(bench.admit(request.length, request.limit))
        assert isinstance(request, process.Fits)
        return process.Returned(bench.fits(request.shape))
    except process.Unmeasurable as error:
        return process.Failed(str(error))
    except Exception as error:  # noqa: BLE001  (a child process: the parent records it and goes on)
        return process.Failed(f"{type(error).__name__}: {error}".splitlines()[0])


def _keep_busy(engine: Engine, work: process.KeepBusy, requests: IO[bytes]) -> None:
    """Serve slices until a request or the end of the stream can be read."""

    def undisturbed(_: object = None) -> bool:
        return not select.select([requests], [], [], 0)[0]

    for shape in cycle(work.shapes):
        if not undisturbed():
            return
        rows = process.slice_rows(shape, engine.facts.vocab_size)
        engine.run(slice_of(rows, shape.steps), undisturbed)


if __name__ == "__main__":
    main()
