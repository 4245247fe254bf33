"""How many drafts a server of vLLM accepts, by its own metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from toolkit.endpoints.target import Metric
from toolkit.files.recipe import AcceptanceSpec

DRAFTED = "vllm:spec_decode_num_drafts_total"  # a row in a pass, whatever their number
AT_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "vllm:generation_tokens_total"
ENDED = "vllm:request_success_total"


def acceptance_of(samples: Iterable[Metric]) -> AcceptanceSpec | None:
    """The acceptance of all engines that a page of metrics counts; None where no drafts are.

    The rate of a position is its accepted drafts over the passes of rows with drafts. Tokens that
    no draft gave say how many passes of rows there were: the first of a request is of its prompt.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    accepted: defaultdict[int, float] = defaultdict(float)
    for name, labels, value in samples:
        sums[name] += value
        if name == AT_POSITION:
            accepted[int(labels["position"])] += value
    drafted = sums[DRAFTED]
    if not drafted or not accepted:
        return None
    rates = [min(accepted[position] / drafted, 1.0) for position in range(max(accepted) + 1)]
    passes = sums[GENERATED] - sum(accepted.values()) - sums[ENDED]
    proposed = min(drafted / passes, 1.0) if passes > 0.0 else 1.0
    return AcceptanceSpec(rates=rates, proposed=proposed)
