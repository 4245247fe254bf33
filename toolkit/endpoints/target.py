"""A server as a target: how to find it, talk to it, and read its metrics."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from toolkit.endpoints.ask import ask
from toolkit.endpoints.upstream import server_url
from toolkit.errors import InputError
from toolkit.openai.answers import Answer, Models, Version
from toolkit.openai.errors import error_text
from toolkit.openai.foreign import decoded, plain
from toolkit.openai.requests import COMPLETIONS

OK = 200
NOT_READY = 503
KEY_REFUSED = (401, 403)
NOT_READY_HINT = "try again when it is ready; llmctl's own server reports that at /ready"
KEY_VARIABLE = "LLMCTL_API_KEY"
# A first answer may take this long. A server that loads its model refuses connections meanwhile.
ANSWER_TIMEOUT_S = 60.0
MAX_METRIC_LINES = 250_000  # of a page of metrics: some six seconds; a server of vLLM has 1,000


@dataclass(slots=True, frozen=True)
class Target:
    """A server that answered."""

    url: str  # scheme, host, port and any path before /v1
    api_key: str
    model: str
    max_model_len: int | None
    own: bool  # llmctl's server, which can hide the trace's lengths from its scheduler
    key_variable: str = KEY_VARIABLE  # the environment variable of the key, for error messages
    front: bool = False  # llmctl's front, which shows the counters of its replicas together

    def ask(self, path: str, fields: dict[str, object] | None = None) -> tuple[int, bytes]:
        """Return the status and the body of the answer to a POST of `fields`, or to a GET without
        any. Raises `InputError` if there is no answer.
        """
        return ask(self.url + path, fields, key=self.api_key, timeout_s=ANSWER_TIMEOUT_S)

    def get(self, path: str) -> bytes:
        """Return the body of an answer. Raises `InputError` if there is none, or its status is not
        200.
        """
        status, body = self.ask(path)
        if status != OK:
            raise self.refusal(path, status, body)
        return body

    def refusal(self, path: str, status: int, body: bytes, hint: str = "") -> InputError:
        """Return the server's refusal in its own words. The status chooses the hint, else `hint` is
        used.
        """
        if status in KEY_REFUSED:
            hint = f"give the key in {self.key_variable}"
        elif status == NOT_READY:
            hint = NOT_READY_HINT
        return InputError(f"{self.url}{path}: HTTP {status}: {error_text(body)}", hint)


def find_target(
    url: str, model: str | None = None, api_key: str = "", key_variable: str = KEY_VARIABLE
) -> Target:
    """Find the server at `url` and the model it serves (its first one if none is named).

    Raises `InputError`, naming the URL, if the server does not answer, refuses the key, or does not
    serve the model. `key_variable` is the variable that this error names.
    """
    base = base_url(url)
    target = Target(base, api_key, "", None, own=False, key_variable=key_variable)
    models = decoded(target.get("/v1/models"), Models)
    if models is None:
        raise InputError(f"{base}/v1/models is not OpenAI's list of models")
    chosen = next((one for one in models.data if model in (None, one.id)), None)
    if chosen is None:
        names = ", ".join(plain(one.id, 80) for one in models.data[:20]) or "none"
        raise InputError(f"{base} does not serve the model '{model}'", f"it serves: {names}")
    return replace(
        target,
        model=chosen.id,
        max_model_len=chosen.max_model_len,
        own=chosen.owned_by == "llmctl" and chosen.replicas is None,
        front=chosen.replicas is not None,
    )


class FrontReplica(msgspec.Struct):
    """One replica, as a front shows it."""

    state: str
    version: str = ""


class FrontState(msgspec.Struct):
    """The page /replicas of a front."""

    router: str
    parameters: dict[str, bool | int | float | str] = {}
    replicas: list[FrontReplica] = []

    @property
    def up(self) -> list[FrontReplica]:
        return [replica for replica in self.replicas if replica.state == "up"]


def front_state(target: Target) -> FrontState:
    """Return the router and the replicas of a front. Raises `InputError` if it does not show
    them.
    """
    state = decoded(target.get("/replicas"), FrontState)
    if state is None:
        raise InputError(f"{target.url}/replicas is not the page of a front")
    return state


def version(target: Target) -> str:
    """Return the version at /version; '' if there is no such page. Raises `InputError` if the
    server does not answer.
    """
    found = decoded(target.ask("/version")[1], Version)
    return found.version if found else ""


def base_url(url: str) -> str:
    """Return the address without query, trailing slash and /v1. Raises `InputError` for an invalid
    URL.
    """
    return str(server_url(url).with_query(None)).rstrip("/").removesuffix("/v1")


REFUSED = (400, 422)  # statuses for an unknown field
TOKEN_IDS_HINT = (
    "llmctl measures servers of /v1/completions that take prompts of token ids, such as vLLM, "
    "SGLang and llama.cpp: name one of these, not a gateway before it"
)


@dataclass(slots=True, frozen=True)
class Dialect:
    """The fields that a server accepts and OpenAI's API does not have.

    Attributes:
        ignore_eos: outputs go on until their limit.
        answer_ids: with `return_token_ids` the answer's ids come with its text. vLLM knows it.
    """

    ignore_eos: bool = True
    answer_ids: bool = False

    def request(
        self,
        model: str,
        prompt: list[int],
        max_tokens: int,
        *,
        end_after: int | None = None,
        stream: bool = True,
        priority: int = 0,
        keep: bool = False,
    ) -> dict[str, object]:
        """Return the body of a greedy completion of `max_tokens`.

        `end_after` ends the output earlier; only llmctl's engine knows it. A `priority` of 0 is
        every server's default and is left out: some servers refuse unknown fields. `keep` requests
        the ids of the answer from a server that gives them.
        """
        fields: dict[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields["stream"] = stream
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if priority:
            fields["priority"] = priority
        if keep and self.answer_ids:
            fields["return_token_ids"] = True
        return fields if end_after is None else fields | {"llmctl_end_after": end_after}

    @property
    def lacks(self) -> list[str]:
        """What this server does not support, in words for people."""
        return [] if self.ignore_eos else ["ignore_eos"]


FULL = Dialect()


def learn(target: Target) -> Dialect:
    """Return the fullest dialect that the server accepts, found with at most two requests.

    Raises `InputError` with the server's own words if it accepts none, as a server that takes
    prompts of text alone.
    """
    for dialect in (FULL, Dialect(ignore_eos=False)):
        status, body = target.ask(COMPLETIONS, dialect.request(target.model, [1], 1))
        if status == OK:
            return dialect
        if status not in REFUSED:
            break
    raise target.refusal(COMPLETIONS, status, body, TOKEN_IDS_HINT)


def with_answer_ids(target: Target, dialect: Dialect) -> Dialect:
    """Return `dialect` with `answer_ids` where the server gives the token ids of its answers, found
    with one request.
    """
    fuller = replace(dialect, answer_ids=True)
    fields = fuller.request(target.model, [1], 1, stream=False, keep=True)
    answer = decoded(target.ask(COMPLETIONS, fields)[1], Answer)
    has_ids = answer is not None and answer.choices and answer.choices[0].token_ids
    return fuller if has_ids else dialect


class Metric(NamedTuple):
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


def scrape(target: Target) -> list[Metric]:
    """Return all metrics; none if the server has no /metrics in Prometheus' text format.

    Raises `InputError` if the server does not answer.
    """
    paths = ["/metrics"]
    if target.front:  # the engines' metrics are those of its replicas
        paths = [f"/replicas/{place}/metrics" for place in range(len(front_state(target).replicas))]
    found: list[Metric] = []
    for path in paths:
        status, body = target.ask(path)
        found += page_metrics(body, target.url + path) if status == OK else []
    return found


def page_metrics(page: bytes, source: str) -> list[Metric]:
    """Return the metrics of a page that `source` gave, without values beyond a float; none where it
    is not in Prometheus' text format.

    Raises `InputError` for a page of more lines than are read in seconds.
    """
    lines = page.count(b"\n")
    if lines > MAX_METRIC_LINES:
        problem = f"{source}: {lines:,} lines; at most {MAX_METRIC_LINES:,} are read"
        raise InputError(problem, "name the /metrics of one server")
    try:
        families = list(text_string_to_metric_families(page.decode("utf-8", "replace")))
    except (ValueError, LookupError, TypeError, AttributeError):  # its parser raises all of them
        return []
    return [
        Metric(sample.name, sample.labels, sample.value)
        for family in families
        for sample in family.samples
        # the parser makes integers of any length
        if isinstance(sample.value, float) or abs(sample.value) <= sys.float_info.max
    ]
