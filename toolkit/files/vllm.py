"""The recipe's settings of engine `vllm`: what its server starts with, beside the model and the scheduler's flags."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from toolkit.files.envelope import Strict

Positive = Annotated[int, Field(gt=0)]


class VllmSpec(Strict):
    """Flags of `vllm serve` that say what a forward pass costs; who is in it is the scheduler's: policy `vllm`."""

    python: str | None = Field(
        default=None,
        description="the Python of the environment that has vLLM; None: LLMCTL_VLLM_PYTHON, else llmctl's own",
    )
    block_size: Positive | None = Field(default=None, description="tokens of a KV block; None: vLLM's own")
    num_gpu_blocks_override: Positive | None = Field(
        default=None, description="KV blocks, one of which vLLM keeps; None: as many as the memory holds"
    )
    enforce_eager: bool = Field(default=False, description="no compiled graphs: starts sooner, steps take longer")
    args: list[str] = Field(default=[], description="more flags, as on vLLM's command line: ['--swap-space', '4']")
