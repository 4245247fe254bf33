"""Traces of sessions: each turn holds the turn before, its answer and something new."""

from collections.abc import Iterable

import numpy as np

from toolkit.traces.types import Sessions, SharedBlocks, Trace

BLOCK = 16
NEW = 40  # tokens of each turn
ANSWER = 20


def conversations(
    starts_s: Iterable[float], turns: int, think_s: float, system_tokens: int = 0
) -> Trace:
    """Sessions that begin at `starts_s`. All prompts begin with the same `system_tokens`."""
    made = [
        (start_s + turn * think_s, session, turn)
        for session, start_s in enumerate(starts_s)
        for turn in range(turns)
    ]
    made.sort()
    places = {(session, turn): place for place, (_, session, turn) in enumerate(made)}
    previous = np.array([places.get((session, turn - 1), -1) for _, session, turn in made])
    prompts = np.array([system_tokens + NEW + turn * (NEW + ANSWER) for _, _, turn in made])
    numbers: dict[tuple[object, ...], int] = {}
    ids: list[int] = []
    for (_, session, turn), prompt in zip(made, prompts.tolist(), strict=True):
        for end in range(BLOCK, prompt + BLOCK, BLOCK):
            part: tuple[object, ...] = (session,) if end <= prompt else (session, turn)
            key = (end,) if end <= system_tokens else (end, *part)
            ids.append(numbers.setdefault(key, len(numbers)))
    offsets = np.concatenate([[0], np.cumsum(-(-prompts // BLOCK))])
    outputs = np.full(len(made), ANSWER)
    return Trace(
        np.array([arrival_s for arrival_s, _, _ in made]),
        prompts,
        outputs,
        np.zeros_like(outputs),
        "t.jsonl",
        shared=SharedBlocks(BLOCK, np.array(ids), offsets),
        sessions=Sessions(previous, np.where(previous < 0, 0.0, think_s)),
    )
