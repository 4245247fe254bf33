"""The front before replicas: requests in, attempts at replicas, one answer out.

`Gateway` passes a request for tokens to the replica that the balancer names, and to another one
when that fails, until the client has the whole answer (`toolkit.gateway.relay`). No accepted
request is lost as long as a replica is up, or comes back within `FrontSettings.wait_up_s`.

`PromptGauge` estimates a prompt's tokens and makes the block hashes for routers that look at
prefixes, both from bytes: a gateway does not tokenize.

Its metrics have the names that the server of one engine uses. Metrics of replicas are called
`llmctl_replica_*`, with the replica's URL as a label. The status page shows no address: it numbers
replicas in the order of /replicas.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.samples import Sample
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.endpoints.target import REPLICA_METRICS, families_in
from toolkit.errors import InputError
from toolkit.gateway.own_replicas import POLL_EVERY_S, OwnReplicas
from toolkit.gateway.prompt_blocks import chained_ids, pieces_of
from toolkit.gateway.relay import NO_REPLICA, RelayedRequest, RetryBudget
from toolkit.gateway.replicas import COUNTERS, LOOP, ReplicaPool
from toolkit.gateway.sources import ReplicaSource, follow_source
from toolkit.openai.errors import RETRY_AFTER_S, ApiError, overloaded
from toolkit.openai.requests import CHAT, COMPLETIONS, RESPONSES, GenerationCall, Prompt
from toolkit.routing.types import BLOCK_TOKENS
from toolkit.sched.policies.parameters import parameters
from toolkit.serve.access import Keyring, check_priority
from toolkit.serve.assemble import FrontSettings
from toolkit.serve.bodies import read_json_bytes
from toolkit.serve.errors import error_response
from toolkit.serve.limits import WireLimits
from toolkit.serve.metrics import families_of_requests, family_of, text_of
from toolkit.serve.routes import Front, Written, json_page, unknown_model
from toolkit.serve.server import RunningRequests
from toolkit.serve.stats import QUEUE_FULL, Stats
from toolkit.traces.write import TraceLog

GENERATING = (COMPLETIONS, CHAT, RESPONSES)
METRICS_TYPE = "text/plain; version=0.0.4"
BYTES_PER_TOKEN = 4.0  # of text, before any was counted
LEAST_BYTES_PER_TOKEN = 1.0  # of a prompt, whatever a server counts
MOST_BYTES_PER_TOKEN = 8.0
COUNTED_PROMPTS = 32  # then the bytes of a block are fixed
GAUGED_PROMPTS = 256  # the last, of which the mean is
GAUGED_TOKENS = 1024  # that one prompt counts for at most
FIRST_TOKENS = 8 * GAUGED_TOKENS  # that the first value counts for
FIRST_PROBES_S = 15.0  # it can serve after this long even if no replica is up
MERGE_EVERY_S = 1.0  # the metrics of replicas, for all readers
MERGE_SHARE = 0.2  # of the time
MAX_METRIC_BYTES = 1 << 12  # of a line of a replica's metrics


class PromptGauge:
    """Estimates of prompts from their bytes, with the mean bytes per token that servers counted.

    One request moves the mean by little, whatever its prompt and its server's count are: what one
    client sends must not change the limits of another.

    A block is a piece of as many bytes as 64 tokens have in the first prompts; equal hashes stand
    for equal bytes in it and in all before it. They are keyed by a secret of this process, so that
    a log of them reveals no prompt.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._gauged: deque[tuple[float, int]] = deque(maxlen=GAUGED_PROMPTS)  # bytes and tokens
        self._counted = 0
        self._block_bytes = round(BLOCK_TOKENS * BYTES_PER_TOKEN)
        self.bytes_per_token = BYTES_PER_TOKEN

    def tokens(self, prompts: Sequence[Prompt]) -> int:
        """About how many tokens prompts have together."""
        counts = (
            len(prompt) if isinstance(prompt, list) else round(len(prompt) / self.bytes_per_token)
            for prompt in prompts
        )
        return max(sum(max(count, 1) for count in counts), 1)

    def blocks(self, prompt: Prompt | None) -> tuple[int, ...]:
        """Return the hashes of a prompt's full blocks."""
        pieces = pieces_of(prompt or b"", BLOCK_TOKENS, self._block_bytes, whole=True)
        return tuple(chained_ids(pieces, self._key))

    def count(self, prompt: Prompt | None, tokens: int) -> None:
        """A server counted a prompt's tokens."""
        if not isinstance(prompt, bytes) or tokens < 1 or not prompt:
            return
        ratio = min(max(len(prompt) / tokens, LEAST_BYTES_PER_TOKEN), MOST_BYTES_PER_TOKEN)
        weight = min(tokens, GAUGED_TOKENS)
        self._gauged.append((ratio * weight, weight))
        sums = [sum(each) for each in zip(*self._gauged, strict=True)]
        self.bytes_per_token = (sums[0] + FIRST_TOKENS * BYTES_PER_TOKEN) / (sums[1] + FIRST_TOKENS)
        self._counted += 1
        if self._counted == COUNTED_PROMPTS:
            self._block_bytes = max(round(BLOCK_TOKENS * self.bytes_per_token), 1)


class Gateway(Front):
    """The front before replicas, and what its requests share.

    Attributes:
        running: requests that have not ended.
        leaving: the end is announced.
        draining: new requests are refused.
        continued: answers that went on at another replica.
    """

    metrics_type = METRICS_TYPE

    def __init__(
        self,
        pool: ReplicaPool,
        settings: FrontSettings,
        keyring: Keyring,
        *,
        stats: Stats | None = None,
        log: TraceLog | None = None,
        replicas: OwnReplicas | ReplicaSource | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        limits = WireLimits(descriptors_each=2)
        super().__init__(settings, keyring, stats or Stats(), pool.background, limits)
        self.now_s = time.monotonic
        self.pool = pool
        self.balancer = pool.balancer
        self.gauge = PromptGauge()
        self.budget = RetryBudget()
        self.leaving = self.draining = False
        self.running = RunningRequests()
        self.continued = 0
        self.log = log
        self.numbers = count(1)  # of the requests
        self._replicas = replicas
        self._say = say
        self._merging = asyncio.Lock()
        self._merged = b""
        self._merge_at_s = -math.inf
        self._start_s = self.now_s()
        for path in GENERATING:
            self.add(path, self._written, "POST")
        self.add("/replicas", self._show_replicas)
        self.add(REPLICA_METRICS, self._replica_metrics)
        self.tasks["silent replicas"] = pool.sweep
        if self.balancer.router.reads_reports:
            self.tasks["reports of replicas"] = pool.read_reports

    @property
    def left(self) -> int:
        return len(self.running)

    def announce_end(self) -> None:
        self.leaving = True

    async def start(self) -> None:
        """Start the replicas, and wait for all; or find those that run already, and wait until one
        is up.
        """
        replicas = self._replicas
        if isinstance(replicas, OwnReplicas):
            await replicas.start()
        elif replicas is not None:
            await self._find(replicas)
        if not self.pool.up:
            self._say("no replica is up yet: requests get 503 until one is")

    async def stop(self) -> None:
        if isinstance(self._replicas, OwnReplicas):
            await self._replicas.stop()
        await self.pool.stop()

    async def _find(self, source: ReplicaSource) -> None:
        pool = self.pool
        say = self._say
        try:
            say(pool.renew(await source.read()))
        except InputError as error:
            if not source.may_come:
                raise
            say(f"warning: {error.message}; it is asked again")
        following = partial(follow_source, source, pool.renew, say, pool.listed)
        pool.background.start("list of replicas", following)
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_PROBES_S):
                while not pool.up and not pool.all_asked:
                    await asyncio.sleep(POLL_EVERY_S / 10)

    @property
    def state(self) -> str:
        if self.leaving:
            return "leaving"
        return "ready" if self.pool.up else NO_REPLICA

    @property
    def uptime_s(self) -> float:
        return self.now_s() - self._start_s

    @property
    def waiting(self) -> int:
        """Requests beyond the rows that the replicas run at once."""
        replicas = self.balancer.replicas
        return sum(max(each.requests - each.traits.max_rows, 0) for each in replicas)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` seconds for those that run."""
        self.draining = True
        await self.running.ended(timeout_s)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.pool.name in Headers(scope=scope).get("via", ""):
            error = ApiError("this request went through this front before", status=LOOP)
            await error_response(error)(scope, receive, send)
            return
        await super()._route(scope, receive, send)

    async def _replica_metrics(self) -> Response:
        """The metrics of all replicas, each with its URL as a label."""
        return Response(await self._merged_metrics(), media_type=METRICS_TYPE)

    async def _show_replicas(self) -> Response:
        """The router and the replicas: their states, problems and counts."""
        router = self.balancer.router
        replicas = [
            {
                "url": each.url,
                "state": each.state,
                "problem": each.problem,
                "version": each.version,
                "running": each.running,
                "requests": each.requests,
                "failures": each.failures,
                "moved": each.moved,
            }
            for each in self.pool.replicas
        ]
        about = {"router": router.name, "parameters": parameters(router)}
        return json_page(about | {"state": self.state, "replicas": replicas})

    async def _merged_metrics(self) -> bytes:
        """The metrics of all replicas, read at most once a second, and for no more than a share of
        the time: readers that come meanwhile get the same.
        """
        async with self._merging:
            if self.now_s() >= self._merge_at_s:
                pages = await self.pool.read_metrics()
                start_s = self.now_s()
                self._merged = await asyncio.to_thread(merged_metrics, pages)
                took_s = self.now_s() - start_s
                self._merge_at_s = self.now_s() + max(MERGE_EVERY_S, took_s / MERGE_SHARE)
            return self._merged

    @property
    def served(self) -> str:
        return self.settings.model or self.pool.model

    def about_model(self) -> dict[str, object]:
        lengths = [each.max_model_len for each in self.pool.up if each.max_model_len]
        return {"replicas": len(self.pool.up), "max_model_len": min(lengths, default=None)}

    def families(self) -> Iterator[Metric]:
        labels = {"model_name": self.served, "router": self.balancer.router.name}
        beyond = "Requests beyond the rows that replicas run at once."
        lost = "Replicas that were up and failed, each time."
        for kind, name, text, value in (
            (Gauge, "requests_running", "Requests that have not ended.", len(self.running)),
            (Gauge, "requests_waiting", beyond, self.waiting),
            (Gauge, "replicas_up", "Replicas that may be sent requests.", len(self.pool.up)),
            (Counter, "replica_losses", lost, self.pool.losses),
            (Counter, "continued", "Answers that another replica continued.", self.continued),
        ):
            yield family_of(kind, f"llmctl_{name}", text, labels, value)
        yield from families_of_requests(self.stats, labels, self.keyring.named)
        by_replica = {
            "up": "1 while a replica may be sent requests.",
            "running": "Requests that a replica has.",
            "requests": "Attempts sent to a replica.",
            "failures": "Attempts that failed there.",
            "moved": "Answers that went on elsewhere.",
        }
        for name, text in by_replica.items():
            kind = Counter if name in COUNTERS else Gauge
            values = {one.url: float(getattr(one, name)) for one in self.pool.replicas}
            yield family_of(kind, f"llmctl_replica_{name}", text, labels, values, "replica")
        text = "Failures of tasks that run beside requests."
        failures = self.pool.background.failures
        yield family_of(Counter, "llmctl_background_task_failures", text, labels, failures, "task")

    def status(self) -> dict[str, Any]:
        """Return what the status page of a front before replicas adds."""
        stats = self.stats
        router = self.balancer.router
        known = self.balancer.replicas
        replicas = [
            {
                "state": one.state,
                "running": max(one.running - known[one.index].waiting, 0),
                "waiting": known[one.index].waiting,
                "kv_share": known[one.index].kv_usage,
                "cached_share": one.cached_share,
                "requests": one.requests,
                "failures": one.failures,
                "moved": one.moved,
            }
            for one in self.pool.replicas
        ]
        waiting = self.waiting
        return {
            "state": self.state,
            "problem": NO_REPLICA if self.state == NO_REPLICA else "",
            "uptime_s": round(self.uptime_s, 1),
            "running": len(self.running) - waiting,
            "waiting": waiting,
            "router": router.name,
            "knobs": parameters(router),
            "workers": [],
            "replicas": replicas,
            "totals": {
                "ended": dict(stats.ended),
                "input_tokens": stats.prompt_tokens,
                "output_tokens": stats.generation_tokens,
                "refused": stats.refused,
                "continued": self.continued,
                "retry_budget": self.budget.share,
            },
        }

    async def _written(self) -> Response:
        """An answer that `_generate` sends as it comes."""
        return Written(self._generate)

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_open()
        arrival_s = self.now_s()
        body = await read_json_bytes(Request(scope, receive), self.settings.max_body_bytes)
        given = Headers(scope=scope)
        call = GenerationCall(scope["path"], body, given.get("x-session-id", ""))
        if self.served and call.model and call.model != self.served:
            raise unknown_model(call.model)
        if self.waiting >= self.settings.max_waiting:
            self.stats.refusals[QUEUE_FULL] += 1
            raise overloaded(f"{self.waiting} requests wait, which is the limit; try again later")
        headers = self.pool.forwarded(given.get("via", ""))
        request = RelayedRequest(self, call, send, arrival_s, headers)
        check_priority(scope, call.priority)
        request.admit()
        with self.running:
            await request.run(receive)

    def _check_open(self) -> None:
        """Raise `ApiError` while the server drains, and without a replica."""
        if self.draining:
            headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
            raise ApiError("the server is draining", status=503, headers=headers)
        if not self.pool.up:
            self.stats.refusals[NO_REPLICA] += 1
            raise overloaded(NO_REPLICA)


def merged_metrics(pages: Mapping[str, bytes]) -> bytes:
    """The metrics of several servers, by URL, as one text with the URLs as the label `replica`. It
    leaves out texts that are not in Prometheus' format, and lines that are too long.
    """
    merged: dict[str, Metric] = {}
    for url, page in pages.items():
        short = b"\n".join(line for line in page.split(b"\n") if len(line) <= MAX_METRIC_BYTES)
        for family in families_in(short.decode(errors="replace")):
            empty = Metric(family.name, family.documentation, family.type)
            merged.setdefault(family.name, empty).samples += [
                Sample(one.name, {"replica": url, **one.labels}, one.value)
                for one in family.samples
            ]
    return text_of(merged.values())
