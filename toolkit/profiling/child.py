"""The process of a profiled engine, started by `EngineProcess`: `python -m
toolkit.profiling.child`.
"""

from __future__ import annotations

import contextlib
import os
from itertools import cycle

from toolkit.engines.protocol import Engine, make_engine, slice_of
from toolkit.errors import LlmctlError
from toolkit.files.recipe import Recipe
from toolkit.processes.channel import Channel, ChannelClosedError
from toolkit.processes.lifeline import channel_to_parent, end_with_parent
from toolkit.profiling import process


def main() -> None:
    """Load the engine that the first frame names, then answer until the parent ends."""
    end_with_parent()  # even if a point blocks the engine
    with contextlib.suppress(ChannelClosedError):
        serve(channel_to_parent())
    os._exit(0)  # nothing here needs cleanup


def serve(channel: Channel) -> None:
    """Answer the frames of a channel. Raises `ChannelClosedError` at their end."""
    load = channel.receive(process.REQUESTS)
    assert isinstance(load, process.LoadEngine)
    recipe = Recipe.model_validate_json(load.recipe_json)
    try:
        engine = make_engine(recipe.model, recipe.engine, recipe.hardware)
    except LlmctlError as error:
        channel.send(process.Failed(error.message, error.hint, error.exit_code))
        return
    bench = process.LocalTimedEngine(engine, recipe.profile.clock)
    channel.send(process.Returned(bench.facts.model_dump_json()))
    while True:
        request = channel.receive(process.REQUESTS)
        if isinstance(request, process.KeepBusy):
            _keep_busy(engine, request)
        else:
            channel.send(_answer(bench, request))


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


def _keep_busy(engine: Engine, work: process.KeepBusy) -> None:
    """Serve slices until the process is ended."""
    for shape in cycle(work.shapes):
        rows = process.slice_rows(shape, engine.facts.vocab_size)
        engine.run(slice_of(rows, shape.steps), lambda _: True)


if __name__ == "__main__":
    main()
