"""What requests and tokens cost, by the price of an hour."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.estimators.load import law_of_steps
from toolkit.estimators.steps import StepShape
from toolkit.files.capacity import Cost
from toolkit.files.fit import StepsFit
from toolkit.traces.types import Trace


def cost_of(
    usd_per_hour: float,
    rate_rps: float,
    metrics: Mapping[str, float],
    steps: StepsFit | None,
    trace: Trace,
) -> Cost:
    """What requests with the lengths of `trace` cost at `rate_rps`, which is above 0.

    The price of a request is divided among its tokens by the time that the law of a pass gives
    them. Without that law (`steps` None) tokens have no price of their own.
    """
    usd = usd_per_hour / 3600.0 / rate_rps  # of a request
    cost = Cost(
        usd_per_hour=usd_per_hour,
        usd_per_million_requests=1e6 * usd,
        usd_per_million_in=None,
        usd_per_million_cached=None,
        usd_per_million_out=None,
    )
    if steps is None:
        return cost
    prompt = float(trace.prompt_tokens.mean())
    output = float(trace.output_tokens.mean())
    cached = prompt * metrics.get("hit_percent", 0.0) / 100.0
    new = prompt - cached
    rows = max(metrics.get("batch_size_mean", 1.0), 1.0)
    law = law_of_steps(steps)
    in_s = law.prompt_token_s(new / 2)
    cached_s = law.prompt_token_s(new) - law.prompt_token_s(0.0)
    decodes = max(round(rows), 1)
    out_s = law.step_s(StepShape(decodes, round(decodes * (prompt + output / 2)))) / decodes
    usd_per_s = usd / (new * in_s + cached * cached_s + output * out_s)
    return cost.model_copy(
        update={
            "usd_per_million_in": 1e6 * usd_per_s * in_s,
            "usd_per_million_cached": 1e6 * usd_per_s * cached_s if cached else None,
            "usd_per_million_out": 1e6 * usd_per_s * out_s,
        }
    )
