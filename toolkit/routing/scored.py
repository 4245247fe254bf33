"""One score, and its presets: the weights, measures and rules of llm-d, Dynamo and SGLang.

docs/decisions.md says where a preset differs from its project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.routing.base import Router
from toolkit.routing.replicas import RouterView
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import Request


def _weight(default: float, doc: str) -> Any:
    return parameter(default, high=100, search=(0.0, 5.0), doc=doc)


@policy()
class ScoredRouter(Router):
    """To the replica with the highest score:

        prefix x matched share of the prompt - queue x length of the queue - kv x use of the cache

    A preset sets the weights and says how `queues` and `uses` are measured.
    """

    prefix: float = _weight(1.0, "weight of the matched share of the prompt")
    queue: float = _weight(1.0, "weight of the queue's length")
    kv: float = _weight(1.0, "weight of the use of the KV cache")

    def choose(self, request: Request, view: RouterView) -> int:
        queues = self.queues(view)
        uses = self.uses(view)
        prefix, queue, kv = self.prefix, self.queue, self.kv  # looked up once, for speed
        costs = [
            queue * queues[place] + kv * uses[place] - prefix * share
            for place, share in enumerate(_shares(view))
        ]
        return view.least(costs)

    def queues(self, view: RouterView) -> list[float]:
        """The length of each replica's queue, in a unit of the preset."""
        raise NotImplementedError

    def uses(self, view: RouterView) -> list[float]:
        """How much of each replica's cache is in use, in a unit of the preset."""
        return [replica.kv_usage for replica in view.replicas]


@policy("llm-d")
class LlmdRouter(ScoredRouter):
    """llm-d's scheduler: the scorers of prefix, queue and KV cache, with its default weights.

    A queue is what a replica reports as waiting, from 0 for the shortest to 1 for the longest; the
    use of a cache is the share that it reports.
    """

    prefix: float = _weight(3.0, "weight of the matched share of the prompt")
    queue: float = _weight(2.0, "weight of the queue's length")
    kv: float = _weight(2.0, "weight of the use of the KV cache")

    def queues(self, view: RouterView) -> list[float]:
        return _from_shortest([replica.waiting for replica in view.replicas])


@policy("dynamo")
class DynamoRouter(ScoredRouter):
    """Dynamo's KV router without cache events: blocks to prefill, and blocks to keep for decoding.

    Both are counted in multiples of the request's own blocks. A matched block saves one to prefill
    and one to keep, hence the weight 2: weight P of the prefill is prefix P + 1 and queue P here.
    """

    prefix: float = _weight(2.0, "weight of the matched share of the prompt")
    queue: float = _weight(1.0, "weight of the tokens to prefill, over those of the request")
    kv: float = _weight(1.0, "weight of the blocks in use, over those of the request")

    def queues(self, view: RouterView) -> list[float]:
        tokens = float(max(len(view.blocks), 1) * view.block_tokens)
        return [replica.prefill_tokens / tokens for replica in view.replicas]

    def uses(self, view: RouterView) -> list[float]:
        blocks = float(max(len(view.blocks), 1))
        return [replica.blocks / blocks for replica in view.replicas]


@policy("sglang")
class SglangRouter(ScoredRouter):
    """SGLang's `cache_aware`: the longest match, by a rule of its own or else the shortest queue.

    The rule: a match counts only if it is long enough and the load is balanced. A queue is all
    requests of a replica, from 0 for the fewest to 1 for the most.
    """

    queue: float = _weight(0.0, "weight of the queue's length beside a match that counts")
    kv: float = _weight(0.0, "weight of the use of the KV cache beside a match that counts")
    threshold: float = parameter(
        0.3, high=1, search=(0.0, 1.0), doc="share of a prompt above which a match counts"
    )
    abs_load: int = parameter(
        64, low=0, search=(1, 256), log=True, doc="requests between the most and the least loaded"
    )
    rel_load: float = parameter(
        1.5, low=1, search=(1.0, 4.0), doc="times the load of the least loaded replica"
    )

    def choose(self, request: Request, view: RouterView) -> int:
        if self.match_counts(view):
            return ScoredRouter.choose(self, request, view)
        return view.least(self.queues(view))

    def queues(self, view: RouterView) -> list[float]:
        return _from_shortest([len(replica.sent) for replica in view.replicas])

    def match_counts(self, view: RouterView) -> bool:
        """Whether the load is balanced and some replica has enough of the prompt."""
        loads = [len(replica.sent) for replica in view.replicas]
        low = min(loads)
        high = max(loads)
        if high - low > self.abs_load and high > self.rel_load * low:
            return False
        return max(_shares(view)) > self.threshold


# Set here, because a compiled class would take them for parameters.
LlmdRouter.reads_reports = True
LlmdRouter.index_blocks = 31_250
DynamoRouter.index_blocks = -1
DynamoRouter.index_ttl_s = 120.0
SglangRouter.index_blocks = -1


def _shares(view: RouterView) -> list[float]:
    """The share of the request's full blocks that each replica has cached."""
    blocks = float(max(len(view.blocks), 1))
    return [view.matched(replica) / blocks for replica in view.replicas]


def _from_shortest(queues: Sequence[int]) -> list[float]:
    """Queue lengths from 0 for the shortest to 1 for the longest; all 0 where they are equal."""
    low = min(queues)
    span = float(max(max(queues) - low, 1))
    return [(length - low) / span for length in queues]
