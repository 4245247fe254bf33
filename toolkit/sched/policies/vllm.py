"""vLLM's own scheduler as a policy, with vLLM's flags as its parameters.

vLLM runs it, not the toolkit's scheduler, and the simulator has a model of it (`toolkit.sim.vllm`).
So it can be named, compared and tuned like other policies, but makes no plan. Parameters are named
as vLLM's flags. The defaults are of its server on a CPU; on a GPU `max_num_seqs` and
`max_num_batched_tokens` are larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from toolkit.catalogue.releases import Release, named, release_of
from toolkit.errors import InputError
from toolkit.sched.policies.parameters import Value, defaults, parameter, validate

MOST_DRAFTS = 32


ROWS = "max_num_seqs"
TOKENS = "max_num_batched_tokens"


@dataclass(frozen=True, slots=True)
class LiveRange:
    """How a live search draws a flag: evenly, or evenly in its logarithm with `log`.

    Attributes:
        least, most: bounds within the running server's; None: only its own.
        off: the share of draws that switch it off (0).
    """

    least: float = 1.0
    most: float | None = None
    log: bool = True
    off: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerFlag:
    """What llmctl knows of a flag of vLLM's scheduler beside its range (`VllmPolicy`).

    Attributes:
        word: its name in tables; "": it is in none.
        off: the value that changes nothing, which no command line needs; None: each one does.
        since: the first release of vLLM that has it; None: all have it.
        search: what `tune` searches where the release has it; None: as the policy says.
        live: how a search on a running server draws it; None: that needs a restart.
        buffers: a running server takes lower values than at its start, and no higher ones.
    """

    word: str = ""
    off: Value | None = None
    since: Release | None = None
    search: tuple[int, int] | None = None
    live: LiveRange | None = None
    buffers: bool = False

    def is_in(self, version: str) -> bool:
        """Return whether a release, such as '0.33.0', has it; '': not known."""
        release = release_of(version)
        return self.since is None or (release is not None and release >= self.since)


# A chunk of fewer than 16 tokens makes passes of hardly any work.
FLAGS = {
    ROWS: SchedulerFlag("rows", live=LiveRange(), buffers=True),
    TOKENS: SchedulerFlag("tokens", live=LiveRange(), buffers=True),
    "long_prefill_token_threshold": SchedulerFlag(
        "threshold", off=0, live=LiveRange(least=16.0, off=0.5)
    ),
    "watermark": SchedulerFlag(live=LiveRange(0.0, 0.3, log=False, off=0.5)),
    "prefill_schedule_interval": SchedulerFlag(off=1, since=(0, 33), search=(1, 8)),
}


def refuse_later(parameters: Mapping[str, Value], version: str) -> None:
    """Raise `InputError` for a flag that this release of vLLM does not have; '': not known."""
    for name, flag in FLAGS.items():
        value = parameters.get(name, flag.off)
        if flag.since and value != flag.off and version and not flag.is_in(version):
            raise InputError(
                f"policy 'vllm': {name} is {value}, and vLLM {version} does not have it",
                f"vLLM {named(flag.since)} and newer do; leave it at {flag.off}",
            )


@dataclass(frozen=True, slots=True)
class VllmPolicy:
    """vLLM's v1 scheduler: FCFS, chunked prefill beside decodes, recompute on preemption."""

    name: ClassVar[str] = "vllm"
    continuous: ClassVar[bool] = True
    engine: ClassVar[str] = "vllm"

    max_num_seqs: int = parameter(
        128, low=1, search=(1, 256), log=True, doc="the most requests that run at once"
    )
    max_num_batched_tokens: int = parameter(
        2048,
        low=1,
        search=(256, 16384),
        log=True,
        doc="the most new tokens in one forward pass, decodes included",
    )
    long_prefill_token_threshold: int = parameter(
        0,
        doc="the most tokens of one prompt in a pass while other requests are there; 0: no such "
        "limit",
    )
    chunked_prefill: bool = parameter(
        True, doc="whether a prompt is cut to the tokens that are left of a pass"
    )
    prefix_caching: bool = parameter(
        True, doc="whether freed blocks are kept for requests with the same tokens"
    )
    watermark: float = parameter(
        0.0,
        high=0.99,
        search=(0.0, 0.3),
        doc="share of the blocks that stay free when one more is admitted",
    )
    num_speculative_tokens: int = parameter(
        0,
        high=MOST_DRAFTS,
        doc="drafts of a row in a pass, of speculative decoding; the recipe's engine.vllm.drafts "
        "says how they are made",
    )

    prefill_schedule_interval: int = parameter(
        1,
        low=1,
        high=1024,
        doc="passes from one with a prefill to the next, while rows decode; vLLM 0.33 and newer",
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"policy 'vllm': max_num_batched_tokens is {self.max_num_batched_tokens}; "
                f"the limit is at least max_num_seqs, {self.max_num_seqs}",
                "vLLM refuses it, because each running request may need a token of a pass",
            )
        if self.long_prefill_token_threshold and not self.chunked_prefill:
            raise InputError(
                "policy 'vllm': a threshold for long prefills needs chunked_prefill=true",
                "set one of the two otherwise",
            )

    @classmethod
    def within(cls, drawn: Mapping[str, Value]) -> dict[str, Value]:
        """The valid parameters nearest to `drawn`: no more rows than tokens of a pass, and no
        threshold for chunks where prompts are not cut.
        """
        whole = {**defaults(cls), **drawn}
        rows = min(int(whole["max_num_seqs"]), int(whole["max_num_batched_tokens"]))
        valid = {**drawn, "max_num_seqs": rows}
        if not whole["chunked_prefill"]:
            valid["long_prefill_token_threshold"] = 0
        return valid
