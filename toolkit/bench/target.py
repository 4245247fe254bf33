"""The server that is measured: found, asked what it serves, and tried with one request before the replay begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import httpx
import msgspec

from toolkit.errors import InputError

PATIENCE_S = 60.0  # for a first answer; a server that is loading its model refuses earlier

Lengths = Literal["hidden", "given"]


class Model(msgspec.Struct):
    """What /v1/models says of a model; only OpenAI's `id` is sure to be there."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Model]


class Problem(msgspec.Struct):
    message: str = ""


class ErrorBody(msgspec.Struct):
    """OpenAI's error object; some servers put a string there, or leave the outer level out."""

    error: Problem | str | None = None
    message: str = ""

    @property
    def text(self) -> str:
        said = self.error.message if isinstance(self.error, Problem) else self.error
        return said or self.message


@dataclass(slots=True, frozen=True)
class Target:
    """A server that answered. `own` says that it is llmctl's, which can hide the trace's lengths from its scheduler."""

    url: str  # scheme, host, port and any path before /v1
    api_key: str
    model: str
    max_model_len: int | None
    own: bool

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def find_target(url: str, model: str | None = None, api_key: str = "") -> Target:
    """The server at `url` and the model it serves (its first, where none is named).

    Raises InputError, naming the URL, where nobody answers, the key is refused, or there is no such model.
    """
    base = _base(url)
    target = Target(base, api_key, "", None, own=False)
    body = _request(target, "GET", "/v1/models", None)
    try:
        found = msgspec.json.decode(body, type=Models).data
    except msgspec.DecodeError as error:
        raise InputError(f"{base}/v1/models is not OpenAI's list of models: {error}") from error
    chosen = next((one for one in found if model in (None, one.id)), None)
    if chosen is None:
        names = ", ".join(one.id for one in found) or "none"
        raise InputError(f"{base} does not serve the model '{model}'", f"it serves: {names}")
    return Target(base, api_key, chosen.id, chosen.max_model_len, own=chosen.owned_by == "llmctl")


def try_out(target: Target, lengths: Lengths, max_tokens: int) -> None:
    """Send one request of one token, with the `max_tokens` to come where that is only a limit.

    Raises InputError with the server's own words where it is refused.
    """
    hidden = lengths == "hidden"
    fields = completion(target.model, [1], max_tokens if hidden else 1, 1 if hidden else None) | {"stream": False}
    del fields["stream_options"]
    _request(target, "POST", "/v1/completions", fields)


def completion(model: str, prompt: list[int], max_tokens: int, end_after: int | None) -> dict[str, object]:
    """The body of a request for exactly `end_after` tokens (known to the engine alone), or for `max_tokens`."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return fields if end_after is None else fields | {"llmctl_end_after": end_after}


def error_text(body: bytes) -> str:
    """What an error's body says, in one line of at most 200 characters."""
    try:
        text = msgspec.json.decode(body, type=ErrorBody).text
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]


def _base(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"'{url}' is not a URL: {error}", "for example http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"'{url}' is not the URL of a server", "for example http://127.0.0.1:8000")
    return str(parsed.copy_with(query=None, fragment=None)).rstrip("/").removesuffix("/v1")


def _request(target: Target, method: str, path: str, fields: dict[str, object] | None) -> bytes:
    url = target.url + path
    try:
        answer = httpx.request(method, url, headers=target.headers, json=fields, timeout=PATIENCE_S, trust_env=False)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{url} does not answer: {reason}", "is the server running? start one: llmctl serve"
        ) from error
    if answer.status_code != 200:
        hint = "give the key in LLMCTL_API_KEY" if answer.status_code in (401, 403) else ""
        raise InputError(f"{url}: HTTP {answer.status_code}: {error_text(answer.content)}", hint)
    return answer.content
