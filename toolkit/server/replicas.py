"""The replicas of a pool: which there are, which are up, and what they report.

`ReplicaPool` follows a changing list of URLs. A replica gets requests once a probe finds it healthy
and with the right model. Traffic (a refused connection, an answer that breaks off, silence) and
probes take it out; only probes bring it back. A replica that is silent
while it has requests is asked for a token; if it gives none, it hangs, and its requests go
elsewhere. One that answers with errors is asked, too: they may be the requests' fault or its own.

What a replica says is bounded where it is read: a page, a number or a word of one replica must not
reach the requests of another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from toolkit.endpoints.upstream import HttpClient, Upstream, UpstreamError
from toolkit.openai.answers import Models, Version
from toolkit.openai.errors import error_text
from toolkit.openai.foreign import decoded, plain
from toolkit.openai.requests import CHAT, COMPLETIONS
from toolkit.routing.balancer import Balancer
from toolkit.routing.types import REPORT_EVERY_S, ReplicaReport, ReplicaTraits
from toolkit.server.background import Background
from toolkit.units import counted

if TYPE_CHECKING:
    from toolkit.server.relay import RelayedRequest

State = Literal["joining", "up", "down", "hung", "left out", "gone"]

PROBE_UP_S = 2.0  # between two probes of a replica that is up
PROBE_DOWN_S = 0.5  # and of one that is not, or failed the last probe
PROBE_TIMEOUT_S = 5.0
FAILED_PROBES = 2  # in a row take a replica out
NOT_SERVED = (401, 403, 404, 405, 501)  # a replica lacks the route or the model, or wants a key
NO_ROUTE = (404, 405, 501)
SWEEP_EVERY_S = 0.25
MAX_PROBE_BYTES = 4 << 20
MAX_PAGE_BYTES = 1 << 20  # of metrics, which are read four times a second
# Bounded by the line, so that a page is read in one pass.
_REPORTED = re.compile(
    rb"^(?:vllm:num_requests|llmctl_requests|vllm:kv|vllm:gpu|llmctl_kv)_"
    rb"(waiting|running|cache_usage)(?:_perc|_ratio)?(?:\{[^\n]*\})? ([^\s]+)",
    re.MULTILINE,
)
MAX_ROWS = 1 << 20  # that a replica may report
_MAX_TOKENS = re.compile(r"max_tokens=(\d{1,9})\b")
MAX_ENGINES = 1024  # of a replica, of which figures are read
_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LiveReplica:
    """One replica.

    Attributes:
        index: in the balancer.
        problem: why it is not up.
        speaks_ids: it gives and takes token ids.
        default_tokens: the most tokens of an answer for which its client names no limit; None: not
            known.
        in_doubt: the next probe asks it for a token; until then others are preferred.
        attempts: the requests that are there.
        heard_s: when the last byte of any answer came.
        lost_s: when it was lost; None while it is up, and before.
        requests, failures, moved: requests that it was sent, attempts that failed there, and
            answers that went on elsewhere.
    """

    url: str
    upstream: Upstream
    index: int
    state: State = "joining"
    problem: str = "not asked yet"
    version: str = ""
    max_model_len: int | None = None
    speaks_ids: bool = False
    default_tokens: int | None = None
    in_doubt: bool = False
    attempts: set[RelayedRequest] = field(default_factory=set)
    heard_s: float = 0.0
    lost_s: float | None = None
    requests: int = 0
    failures: int = 0
    moved: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        return self.state == "up"

    @property
    def running(self) -> int:
        """Requests that are there."""
        return len(self.attempts)

    def cut_all(self, reason: str) -> None:
        for attempt in list(self.attempts):
            attempt.cut(reason)


@dataclass(frozen=True, slots=True)
class ReplicaNeeds:
    """What a replica must be like; others are left out.

    Attributes:
        model: '': that of the first replica that answers.
        max_model_len: the least; None: any.
        version: of its server; '': any.
    """

    model: str = ""
    max_model_len: int | None = None
    version: str = ""


class UnfitError(Exception):
    """Why a replica may not be sent requests, and the state that it has then."""

    def __init__(self, why: str, state: State = "down") -> None:
        super().__init__(why)
        self.state = state


class ReplicaPool:
    """The replicas, and the tasks that watch them.

    Args:
        balancer: is told which replicas are up, and what they report.
        traits: what is known of each replica.
        needs: what a replica must be like.
        hang_s: a replica is suspect after this number of seconds without a byte.
        key: sent to the replicas; '': none.
    """

    def __init__(
        self,
        balancer: Balancer,
        traits: ReplicaTraits,
        needs: ReplicaNeeds,
        *,
        hang_s: float,
        key: str = "",
    ) -> None:
        self.replicas: list[LiveReplica] = []  # without those that are gone
        self.by_index: dict[int, LiveReplica] = {}
        self.model = needs.model
        self.changed = asyncio.Event()  # a replica came up
        self.key = key
        self.headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        self.json_headers = [*self.headers, (b"content-type", b"application/json")]
        self.balancer = balancer
        self._traits = traits
        self._needs = needs
        self.hang_s = hang_s
        self._free: list[int] = []  # indexes of the balancer: their replicas are gone
        self.background = Background()
        self.losses = 0  # of replicas that were up, each time
        self.http = HttpClient()
        self._tasks: dict[LiveReplica, asyncio.Task[None]] = {}

    @property
    def up(self) -> list[LiveReplica]:
        return [replica for replica in self.replicas if replica.up]

    def renew(self, wanted: Sequence[str]) -> str:
        """Use the replicas with these URLs from now on. Returns a message about the change.
        Requests on a replica that is no longer listed may end there.
        """
        known = {one.url for one in self.replicas}
        new = [url for url in wanted if url not in known]
        gone = [one for one in self.replicas if one.url not in wanted]
        for replica in gone:
            self.remove(replica)
        for url in new:
            self.add(url)
        came = ", ".join(new) or "none"
        went = ", ".join(replica.url for replica in gone) or "none"
        return f"{counted(len(wanted), 'replica')}; new: {came}; gone: {went}"

    def add(self, url: str) -> LiveReplica:
        """Watch a further replica."""
        index = self._free.pop() if self._free else self.balancer.add(self._traits)
        replica = LiveReplica(url, Upstream(url, math.inf, http=self.http), index)
        self.replicas.append(replica)
        self.by_index[replica.index] = replica
        self._tasks[replica] = self.background.start("probes", partial(self._watch, replica))
        return replica

    def remove(self, replica: LiveReplica) -> None:
        """Send a replica nothing more."""
        self._take_out(replica, "gone", "no longer listed")
        self.replicas.remove(replica)
        self._tasks.pop(replica).cancel()
        self._release(replica)

    def failed(self, replica: LiveReplica, why: str) -> None:
        """Send a replica nothing until it answers a probe: it refused a connection or broke off."""
        if replica.up:
            self._lose(replica, "down", why)
        replica.wake.set()

    def answered(self, replica: LiveReplica, status: int) -> None:
        """Note the status of an answer. A failure, or what it cannot serve, puts the replica in
        doubt: the request may be at fault, so it is asked itself.
        """
        if status in NOT_SERVED or (status >= 500 and status != 503):
            self.doubt(replica)

    def doubt(self, replica: LiveReplica) -> None:
        """Ask a replica soon whether it serves at all."""
        if replica.up:
            replica.in_doubt = True
            replica.wake.set()

    def ended(self, replica: LiveReplica, attempt: RelayedRequest) -> None:
        """An attempt at a replica is over."""
        replica.attempts.discard(attempt)
        if replica.state == "gone":
            self._release(replica)

    def barred(self) -> list[int]:
        """Indexes of replicas in doubt."""
        return [replica.index for replica in self.up if replica.in_doubt]

    async def sweep(self) -> None:
        """Cut silent answers, and check silent replicas, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            now_s = time.monotonic()
            for replica in list(self.by_index.values()):
                for attempt in list(replica.attempts):
                    if attempt.must_follow and now_s - attempt.heard_s > self.hang_s:
                        attempt.cut(f"it was silent for {self.hang_s:g} s")
                if not replica.in_doubt and self._is_silent(replica):
                    self.doubt(replica)

    def _is_silent(self, replica: LiveReplica) -> bool:
        """Return whether nothing came from a replica for `hang_s` seconds, though it has requests
        that are older.
        """
        sent_s = min((attempt.heard_s for attempt in replica.attempts), default=math.inf)
        return time.monotonic() - max(replica.heard_s, sent_s) > self.hang_s

    async def read_reports(self) -> None:
        """Give the balancer the replicas' own figures, until cancelled."""
        while True:
            up = self.up
            found = await asyncio.gather(*map(self.figures, up))
            for replica, figures in zip(up, found, strict=True):
                if replica.up and figures is not None:
                    waiting, _, usage = figures
                    self.balancer.report(replica.index, ReplicaReport(waiting, usage))
            await asyncio.sleep(REPORT_EVERY_S)

    async def stop(self) -> None:
        await self.background.stop()
        await self.http.close()

    def _take_out(self, replica: LiveReplica, state: State, why: str) -> None:
        if replica.up:
            self.balancer.change(replica.index, is_up=False)
        replica.state = state
        replica.problem = why

    def _lose(self, replica: LiveReplica, state: State, why: str) -> None:
        """Take out a replica that was up, log it and count it."""
        self._take_out(replica, state, why)
        replica.lost_s = time.monotonic()
        self.losses += 1
        _logger.warning("replica %s is %s: %s", replica.url, state, why)

    def _release(self, replica: LiveReplica) -> None:
        """Forget a replica that is gone once its last request has ended."""
        if not replica.attempts and self.by_index.get(replica.index) is replica:
            del self.by_index[replica.index]
            self._free.append(replica.index)

    async def _watch(self, replica: LiveReplica) -> None:
        """Probe a replica until cancelled."""
        failed = 0
        while True:
            try:
                await self._probe(replica)
                failed = 0
                if not replica.up:
                    self._take_in(replica)
            except UnfitError as unfit:
                failed += 1
                self._on_unfit(replica, unfit.state, str(unfit), failed)
            replica.wake.clear()
            with suppress(TimeoutError):
                # `wait_for` of Python 3.11 may lose a cancel
                async with asyncio.timeout(PROBE_DOWN_S if failed else PROBE_UP_S):
                    await replica.wake.wait()
                await asyncio.sleep(PROBE_DOWN_S / 5)  # what has just failed needs a moment

    def _take_in(self, replica: LiveReplica) -> None:
        """Send a replica requests from now on."""
        replica.state = "up"
        replica.problem = ""
        self.balancer.change(replica.index, is_up=True, is_fresh=True)
        away = ""
        if replica.lost_s is not None:
            away = f": it was away for {time.monotonic() - replica.lost_s:.1f} s"
        replica.lost_s = None
        _logger.info("replica %s is up%s", replica.url, away)
        self.changed.set()

    def _on_unfit(self, replica: LiveReplica, state: State, why: str, failed: int) -> None:
        """Note why a replica failed a probe, the last of `failed` in a row."""
        if not replica.up:
            # Its loss was logged with the first reason; /replicas shows the latest.
            if why != replica.problem and (state == "left out" or replica.lost_s is None):
                _logger.warning("replica %s is %s: %s", replica.url, state, why)
            if replica.state != "hung":
                replica.state = state
            replica.problem = why
        elif self._is_silent(replica):
            why = f"it was silent for {self.hang_s:g} s, and when asked: {why}"
            self._lose(replica, "hung", why)
            replica.cut_all(why)
        elif state == "left out" or failed >= FAILED_PROBES or replica.in_doubt:
            self._lose(replica, state, why)

    async def _probe(self, replica: LiveReplica) -> None:
        """Raise UnfitError if a replica cannot serve."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, _ = await self._ask(replica, "/health")
                if status not in (200, 404):
                    raise UnfitError(f"/health answered {status}")
                await self._identify(replica)  # another model may run there since
            if replica.in_doubt:
                await self._ask_token(replica)
                replica.in_doubt = False
                replica.heard_s = time.monotonic()  # asked again after `hang_s`
        except TimeoutError:
            raise UnfitError(f"no answer within {PROBE_TIMEOUT_S:g} s") from None
        except UpstreamError as error:
            if not (error.here and replica.up):  # else nothing is known of it
                raise UnfitError(str(error)) from None

    async def _identify(self, replica: LiveReplica) -> None:
        """Note what a replica says of itself. Raises UnfitError for a wrong model, context or
        version.
        """
        status, body = await self._ask(replica, "/v1/models")
        if status != 200:
            raise UnfitError(f"/v1/models answered {status}")
        models = decoded(body, Models)
        if models is None:
            raise UnfitError("/v1/models is not OpenAI's")
        needs = self._needs
        wanted = self.model
        if not models.data:
            raise UnfitError("it serves no model", "left out")
        model = next((one for one in models.data if one.id == wanted), models.data[0])
        if model.replicas is not None:  # requests could go round in a circle
            raise UnfitError("it serves replicas itself", "left out")
        if wanted and model.id != wanted:
            raise UnfitError(f"it serves '{plain(model.id, 80)}', not '{wanted}'", "left out")
        length = model.max_model_len or None
        if needs.max_model_len and length is not None and length < needs.max_model_len:
            why = f"it serves {length} tokens of context, fewer than {needs.max_model_len}"
            raise UnfitError(why, "left out")
        status, body = await self._ask(replica, "/version")
        version = decoded(body, Version) if status == 200 else None
        replica.version = plain(version.version, 80) if version is not None else ""
        known = replica.version.partition("+")[0]  # without what a build adds
        if needs.version and known and known != needs.version:
            why = f"it runs version {replica.version}, not {needs.version}"
            raise UnfitError(why, "left out")
        self.model = self.model or plain(model.id)
        replica.max_model_len = length
        replica.speaks_ids = model.owned_by == "vllm"
        if not replica.up:
            replica.default_tokens = await self._default_tokens(replica)

    async def _default_tokens(self, replica: LiveReplica) -> int | None:
        """The most tokens of an answer for which its client names no limit; None: not known.

        No page of vLLM has it, but its refusal of a larger `min_tokens` names it, and costs no
        token. Other servers, which do not know `min_tokens`, are not asked.
        """
        if not replica.speaks_ids:
            return None
        messages = [{"role": "user", "content": "a"}]
        fields = {"model": self.model, "messages": messages, "min_tokens": (1 << 31) - 1}
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S / 5):
                status, body = await self._ask(replica, CHAT, fields)
        except (TimeoutError, UpstreamError):
            return None
        found = _MAX_TOKENS.search(error_text(body)) if status == 400 else None
        return int(found[1]) if found else None

    async def _ask(
        self,
        replica: LiveReplica,
        path: str,
        fields: dict[str, Any] | None = None,
        most_bytes: int = MAX_PROBE_BYTES,
    ) -> tuple[int, bytes]:
        """The status and the body of an answer: to a POST of `fields` as JSON, else to a GET. It is
        read until it has more than `most_bytes`.
        """
        method = "GET"
        headers = self.headers
        content = b""
        if fields is not None:
            method = "POST"
            headers = self.json_headers
            content = msgspec.json.encode(fields)
        answer = await replica.upstream.send(method, path.encode(), headers, content)
        async with aclosing(answer):
            return answer.status, await answer.read(most_bytes)

    async def _ask_token(self, replica: LiveReplica) -> None:
        """Raise UnfitError if a replica generates no token within `hang_s`, and is not only busy
        with others.
        """
        text = {"model": self.model, "prompt": "a", "max_tokens": 1}
        chat = {"model": self.model, "messages": [{"role": "user", "content": "a"}]}
        try:
            async with asyncio.timeout(self.hang_s):
                status, _ = await self._ask(replica, COMPLETIONS, text)
                if status in NO_ROUTE:  # a server of chats alone
                    status, _ = await self._ask(replica, CHAT, chat | {"max_tokens": 1})
        except TimeoutError:
            if replica.up and time.monotonic() - replica.heard_s < self.hang_s:
                return  # it has a long queue
            raise UnfitError(f"it generated no token within {self.hang_s:g} s") from None
        except UpstreamError:
            raise UnfitError("it broke off when asked for a token") from None
        if status in NOT_SERVED or status >= 500:
            raise UnfitError(f"it answered {status} when asked for a token")

    async def figures(self, replica: LiveReplica) -> tuple[int, int, float] | None:
        """Return a replica's waiting and running requests and the used share of its KV cache, from
        its /metrics, vLLM's or llmctl's; None where it has none of them. Of several engines,
        requests are added, and the fullest cache counts.
        """
        found = _REPORTED.findall(await self.metrics_page(replica) or b"")[: 3 * MAX_ENGINES]
        figures = {b"waiting": [0.0], b"running": [0.0], b"cache_usage": [0.0]}
        for name, text in found:
            with suppress(ValueError):
                if math.isfinite(value := float(text)):
                    figures[name].append(value)
        if not any(values[1:] for values in figures.values()):
            return None
        waiting, running = (
            int(min(max(sum(figures[name]), 0), MAX_ROWS)) for name in (b"waiting", b"running")
        )
        return waiting, running, min(max(figures[b"cache_usage"]), 1.0)

    async def metrics_page(self, replica: LiveReplica) -> bytes | None:
        """A replica's /metrics; None where it has none."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                status, body = await self._ask(replica, "/metrics", None, MAX_PAGE_BYTES)
        except (TimeoutError, UpstreamError):
            return None
        return body if status == 200 and len(body) <= MAX_PAGE_BYTES else None
