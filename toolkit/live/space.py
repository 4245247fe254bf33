"""The settings that a search on a running server tries, within the bounds that it says it has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.endpoints.settings import LiveState
from toolkit.errors import InputError
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.world import World

Settings = dict[str, Value]
THRESHOLD = "long_prefill_token_threshold"
ROWS = "max_num_seqs"
TOKENS = "max_num_batched_tokens"
WATERMARK = "watermark"
LEAST_THRESHOLD = 16  # tokens of a chunk; shorter ones make passes of hardly any work
MOST_WATERMARK = 0.3


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting's range. `off`: the share of draws that switch it off (0)."""

    name: str
    low: float
    high: float
    log: bool
    whole: bool
    off: float = 0.0

    def at(self, place: float) -> Value:
        """The value at a place from 0 to 1."""
        if place < self.off:
            return 0 if self.whole else 0.0
        place = (place - self.off) / (1.0 - self.off)
        if self.log:
            value = self.low * math.exp(math.log(self.high / self.low) * place)
        else:
            value = self.low + (self.high - self.low) * place
        return round(value) if self.whole else round(value, 3)


def dimensions(state: LiveState) -> list[Dimension]:
    """The settings that are searched. `InputError` where the server has none of them: its policy is
    llmctl's own.
    """
    if state.named("policy") is None:
        raise InputError(
            "this server runs a policy of llmctl's, and a live search tunes vLLM's own",
            "change its parameters with: llmctl set",
        )
    found = []
    for name, log, off in ((ROWS, True, 0.0), (TOKENS, True, 0.0), (THRESHOLD, True, 0.5)):
        known = state.named(name)
        if known is None or known.low is None or known.high is None:
            continue
        low = max(known.low, LEAST_THRESHOLD) if name == THRESHOLD else max(known.low, 1.0)
        if low < known.high:
            found.append(Dimension(name, low, known.high, log, True, off))
    if state.named(WATERMARK) is not None:
        found.append(Dimension(WATERMARK, 0.0, MOST_WATERMARK, False, False, 0.5))
    return found


def is_modelled(name: str, world: World) -> bool:
    """Whether the simulator knows what a setting does to this engine."""
    return name != THRESHOLD or world.engine().caches is None


def drawn(space: Sequence[Dimension], count: int, seed: int) -> list[Settings]:
    """So many settings, spread evenly over each dimension (a Latin hypercube)."""
    rng = np.random.default_rng(seed)
    places = {one.name: (rng.permutation(count) + rng.random(count)) / count for one in space}
    return [{one.name: one.at(float(places[one.name][k])) for one in space} for k in range(count)]


def policy_of(planned: Mapping[str, Value], settings: Mapping[str, Value]) -> VllmPolicy:
    """vLLM's scheduler with the plan's flags and these live settings."""
    known = {name: settings[name] for name in settings if name in VllmPolicy.__dataclass_fields__}
    return VllmPolicy(**VllmPolicy.within({**planned, **known}))  # type: ignore[arg-type]
