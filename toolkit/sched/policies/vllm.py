"""What vLLM does by itself: its own scheduler, known here by its flags.

Our scheduler does not run it: vLLM does, and the simulator has a model of it (`toolkit.sim.paged`).
So it has parameters as policies have them, to be named, compared and tuned like theirs, and makes
no plan. Parameters are called as vLLM's flags are. Its defaults are those of its server on a CPU;
on a GPU `max_num_seqs` and `max_num_batched_tokens` are larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from toolkit.errors import InputError
from toolkit.sched.policies.parameters import Value, defaults, knob, validate


@dataclass(frozen=True, slots=True)
class VllmPolicy:
    """vLLM's v1 scheduler: first come first served, chunks of prompts beside decodes, preemption by
    recompute.
    """

    name: ClassVar[str] = "vllm"
    continuous: ClassVar[bool] = True
    engine: ClassVar[str] = "vllm"

    max_num_seqs: int = knob(
        128, low=1, search=(1, 256), log=True, doc="the most requests that run at once"
    )
    max_num_batched_tokens: int = knob(
        2048,
        low=1,
        search=(256, 8192),
        log=True,
        doc="the most new tokens in one forward pass, decodes included",
    )
    chunked_prefill: bool = knob(
        True, doc="whether prompts are cut to what is left of a pass's tokens"
    )
    prefix_caching: bool = knob(
        True, doc="whether freed blocks are kept for who comes back with the same tokens"
    )
    watermark: float = knob(
        0.0,
        high=0.99,
        search=(0.0, 0.3),
        doc="share of the blocks that stay free when one more is admitted",
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"policy 'vllm': max_num_batched_tokens is {self.max_num_batched_tokens}; "
                f"the limit is at least max_num_seqs, {self.max_num_seqs}",
                "vLLM refuses it: each request that runs may need a token of a pass",
            )

    @classmethod
    def within(cls, drawn: Mapping[str, Value]) -> dict[str, Value]:
        """The parameters nearest to `drawn` that vLLM takes: as many requests as a pass has tokens,
        at most.
        """
        whole = {**defaults(cls), **drawn}
        return {
            **drawn,
            "max_num_seqs": min(int(whole["max_num_seqs"]), int(whole["max_num_batched_tokens"])),
        }
