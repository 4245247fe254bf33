"""How the lengths of a trace were made to fit a model: the numbers, and what they mean for a result.

Commands write these numbers into their files and their `--json`, and say the words wherever a
result rests on such requests.
"""

from __future__ import annotations

from pydantic import Field

from toolkit.files.envelope import Strict

NOTABLE_DIVISOR = 2.0  # beyond it the requests are other requests, and every result has to say so


class ScaledLengths(Strict):
    """What was done to the prompts, or to the outputs. Lengths are in tokens."""

    limit_tokens: int = Field(description="the longest that fits")
    percentile_99_tokens: float = Field(description="in the trace")
    longest_tokens: int = Field(description="in the trace")
    mean_tokens: float = Field(description="in the trace")
    divisor: float = Field(description="what every length was divided by; 1: nothing was divided")
    clipped: int = Field(description="requests that were cut to the limit after the division")
    scaled_mean_tokens: float = Field(description="after division and clipping")


class Scaling(Strict):
    """What was done to the lengths of a trace so that prompt + output fit a context."""

    requests: int
    max_model_len: int
    max_new_tokens: int
    model_context: int | None = Field(
        default=None,
        description="model.config.max_position_embeddings of the recipe; none: not said",
    )
    prompts: ScaledLengths
    outputs: ScaledLengths

    @property
    def notable(self) -> bool:
        """Whether the requests are so far from the trace's that each result has to say so."""
        return max(self.prompts.divisor, self.outputs.divisor) > NOTABLE_DIVISOR

    def summary(self) -> str:
        """All that was done, in one line."""
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        return "; ".join(f"{name} {self._done(one)}" for name, one in both)

    def divided(self) -> str:
        """What was divided, and by how much: 'prompts divided by 11.91'; '' where nothing was."""
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        return ", ".join(f"{name} divided by {one.divisor:.4g}" for name, one in both if one.divisor > 1.0)

    def warnings(self) -> list[str]:
        """What a reader of a result must know, a sentence each; none where nothing is `notable`."""
        if not self.notable:
            return []
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        divided = ", ".join(
            f"{name} are divided by {one.divisor:.4g}"
            f" (mean {one.mean_tokens:,.0f} -> {one.scaled_mean_tokens:,.0f} tokens)"
            for name, one in both
            if one.divisor > NOTABLE_DIVISOR
        )
        lines = [f"not the trace's own requests: {divided}"]
        if self.prompts.divisor > NOTABLE_DIVISOR:
            lines.append(self._context())
        if self.outputs.divisor > NOTABLE_DIVISOR:
            lines.append(f"max_new_tokens: {self.max_new_tokens} is what cuts the outputs")
        return lines

    def _done(self, one: ScaledLengths) -> str:
        parts = []
        if one.divisor > 1.0:
            edge = f"99th percentile {one.percentile_99_tokens:.0f} -> {one.limit_tokens}"
            parts.append(f"divided by {one.divisor:.4g} ({edge})")
        if one.clipped:
            share = f"{one.clipped:,} of {self.requests:,}, {100 * one.clipped / self.requests:.1f} %"
            parts.append(f"clipped to {one.limit_tokens} tokens ({share})")
        return ", ".join(parts) or f"unchanged: all within {one.limit_tokens} tokens"

    def _context(self) -> str:
        """What cuts the prompts: the recipe, or the model itself."""
        now, context = f"max_model_len: {self.max_model_len}", self.model_context
        if context is None:
            return f"{now} is what cuts the prompts; raise it if the model takes more"
        if context <= self.max_model_len:
            return f"the model takes no more than {context:,} tokens, which is what cuts the prompts"
        longest_output = max(self.max_new_tokens, self.outputs.longest_tokens)
        if self.prompts.longest_tokens + longest_output <= context:
            return f"the model takes {context:,} tokens, so every prompt as it is; {now} in the recipe is what cuts"
        left = max(1.0, self.prompts.percentile_99_tokens / (context - self.max_new_tokens))
        return (
            f"the model takes {context:,} tokens; {now} in the recipe is what cuts:"
            f" with {context} prompts would be divided by {left:.4g}"
        )
