"""The server that is measured: found, and asked what it serves."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
import msgspec

from toolkit.endpoints.trust import HINT, distrusted, verify
from toolkit.errors import InputError

HINTS = {
    401: "give the key in LLMCTL_API_KEY",
    403: "give the key in LLMCTL_API_KEY",
    503: "try again when it is ready; llmctl's says so itself, and at /ready",
}
PATIENCE_S = 60.0  # for a first answer; a server that is loading its model refuses earlier


class Model(msgspec.Struct):
    """What /v1/models says of a model; only OpenAI's `id` is sure to be there."""

    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class Models(msgspec.Struct):
    data: list[Model]


class Version(msgspec.Struct):
    version: str = ""


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
    base = base_url(url)
    target = Target(base, api_key, "", None, own=False)
    body = get(target, "/v1/models")
    try:
        found = msgspec.json.decode(body, type=Models).data
    except msgspec.DecodeError as error:
        raise InputError(f"{base}/v1/models is not OpenAI's list of models: {error}") from error
    listed = found or ([Model(model)] if model else [])  # transformers' serve lists its cache, and serves folders, too
    chosen = next((one for one in listed if model in (None, one.id)), None)
    if chosen is None:
        names = ", ".join(one.id for one in found) or "none"
        raise InputError(f"{base} does not serve the model '{model}'", f"it serves: {names}")
    return Target(base, api_key, chosen.id, chosen.max_model_len, own=chosen.owned_by == "llmctl")


def version(target: Target) -> str:
    """What /version says; '' where there is no such page."""
    try:
        return msgspec.json.decode(get(target, "/version"), type=Version).version
    except (InputError, msgspec.DecodeError):
        return ""


def error_text(body: bytes) -> str:
    """What an error's body says, in one line of at most 200 characters."""
    try:
        text = msgspec.json.decode(body, type=ErrorBody).text
    except msgspec.DecodeError:
        text = body.decode(errors="replace")
    return " ".join(text.split())[:200]


def base_url(url: str) -> str:
    """The address without query, trailing slash and /v1. `InputError` for what is no URL of a server."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"'{url}' is not a URL: {error}", "for example http://127.0.0.1:8000") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"'{url}' is not the URL of a server", "for example http://127.0.0.1:8000")
    return str(parsed.copy_with(query=None, fragment=None)).rstrip("/").removesuffix("/v1")


def post(target: Target, path: str, fields: dict[str, object]) -> tuple[int, bytes]:
    """Status and body of an answer, whatever it is. `InputError`, naming the URL, where nobody answers."""
    answer = _answer(target, "POST", path, fields)
    return answer.status_code, answer.content


def get(target: Target, path: str) -> bytes:
    """The body of an answer. `InputError`, naming the URL, where nobody answers, or with anything but 200."""
    answer = _answer(target, "GET", path, None)
    if answer.status_code != 200:
        raise refusal(target, path, answer.status_code, answer.content)
    return answer.content


def refusal(target: Target, path: str, status: int, body: bytes, hint: str = "") -> InputError:
    """The server's refusal in its own words; the hint is of the status, or else `hint`."""
    hint = HINTS.get(status, hint)
    return InputError(f"{target.url}{path}: HTTP {status}: {error_text(body)}", hint)


def _answer(target: Target, method: str, path: str, fields: dict[str, object] | None) -> httpx.Response:
    url = target.url + path
    try:
        return httpx.request(
            method,
            url,
            headers=target.headers,
            json=fields,
            timeout=PATIENCE_S,
            trust_env=False,
            verify=verify(url),
        )
    except httpx.HTTPError as error:
        if untrusted := distrusted(error):
            raise InputError(f"{target.url}: {untrusted}", HINT) from None
        reason = str(error) or type(error).__name__
        raise InputError(
            f"{url} does not answer: {reason}", "is the server running? start one: llmctl serve"
        ) from error
