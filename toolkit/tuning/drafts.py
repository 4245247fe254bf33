"""Up to how many running requests drafts give more than they cost."""

from __future__ import annotations

from dataclasses import replace

from toolkit.estimators.steps import StepShape
from toolkit.files.tuning import DraftGain
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace


def draft_gain(world: World, flags: VllmPolicy, trace: Trace) -> DraftGain | None:
    """Up to how many rows a token takes less time with drafts than without, in passes of decodes
    alone, with caches that hold what the requests of `trace` have on average. Of the drafts of
    `flags`, or if these are none, of the most that were measured; None if their laws are not both
    known.
    """
    engine = world.engine()
    numbers = sorted(each.draft_tokens for each in (engine, *engine.others))
    tokens = flags.num_speculative_tokens or numbers[-1]
    if numbers[0] or not tokens:
        return None
    plain = world.engine_of(replace(flags, num_speculative_tokens=0))
    drafting = world.engine_of(replace(flags, num_speculative_tokens=tokens))
    cached = float(trace.prompt_tokens.mean() + trace.output_tokens.mean() / 2)
    pays = 0
    for rows in range(1, flags.max_num_seqs + 1):
        if token_s(drafting, rows, cached) >= token_s(plain, rows, cached):
            break
        pays = rows
    return DraftGain(tokens=tokens, rows=pays, most_rows=flags.max_num_seqs)


def token_s(engine: PagedEngine, rows: int, cached: float) -> float:
    """Seconds of a token of one of so many rows that decode, each with `cached` tokens before."""
    drafts = engine.drafts
    drafted = 0
    length = 1.0
    if drafts is not None:
        drafted = round(rows * drafts.tokens * drafts.proposed)
        length = drafts.length
    shape = StepShape(rows, round(rows * cached), draft_tokens=drafted)
    return engine.steps.step_s(shape) / length
