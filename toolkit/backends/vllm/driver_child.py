"""vLLM's own schedulers, step by step: `python -m toolkit.backends.vllm.driver_child MODEL-FOLDER`
in vLLM's Python.

It reads messages of `toolkit.backends.vllm.driver` from standard input, one a line, and answers
each on standard output; its first line says which vLLM it loaded, and from where. It ends when its
input ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from toolkit.backends.vllm.conformance.child import ENVIRONMENT, as_cpu_build
from toolkit.backends.vllm.driven import DrivenScheduler
from toolkit.backends.vllm.messages import (
    REQUESTS,
    AddRequest,
    Answered,
    CloseScheduler,
    GivenTokens,
    GiveTokens,
    LoadedVllm,
    OpenScheduler,
    PlanPass,
)


def _answer(model: str, schedulers: dict[int, DrivenScheduler], line: bytes) -> object:
    """The answer to a message."""
    message = REQUESTS.decode(line)
    match message:
        case OpenScheduler():
            schedulers[message.scheduler] = DrivenScheduler(model, message.settings)
            return Answered()
        case AddRequest():
            tokens = [
                token for first, count in message.tokens for token in range(first, first + count)
            ]
            prompt = tokens[: message.prompt]
            outputs = tokens[message.prompt :]
            schedulers[message.scheduler].enter(message.number, prompt, outputs, message.limit)
            return Answered()
        case PlanPass():
            return schedulers[message.scheduler].plan()
        case GiveTokens():
            driven = schedulers[message.scheduler]
            ended = driven.give(dict(message.accepted), dict(message.offered))
            return GivenTokens(ended=ended, free=driven.free, waiting=len(driven.scheduler.waiting))
        case CloseScheduler():
            schedulers.pop(message.scheduler).scheduler.shutdown()
            return Answered()


def main() -> None:
    """The program; see above."""
    [model] = sys.argv[1:]
    os.environ |= ENVIRONMENT
    # what vLLM prints is not for the other side
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    as_cpu_build()
    import vllm

    loaded = LoadedVllm(
        version=vllm.__version__.partition("+")[0], path=str(Path(vllm.__file__).parent)
    )
    answers.write(msgspec.json.encode(loaded) + b"\n")
    schedulers: dict[int, DrivenScheduler] = {}
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(_answer(model, schedulers, line)) + b"\n")


if __name__ == "__main__":
    main()
