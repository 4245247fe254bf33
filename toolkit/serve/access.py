"""Access to the server: API keys, each with limits of its own.

`read_keys` reads the keys file, which names the clients. It holds sha256 digests instead of keys,
so it may be read, mailed and kept in version control: keys are long and random, unlike passwords,
so a plain digest cannot be guessed back. Recipes and plans do not name this file: they describe
what is served and move between machines, while the clients belong to the place of the server.

A request is checked against the limits of its key in three steps, each as early as possible:
whether the key may send another request (before its body is read), whether it may have so many
choices at once (before tokenizing), and whether it may use so many tokens (once the prompt is
counted). The last step reserves what the answer may become, which is the prompt plus `max_tokens`
for each choice, and returns the rest when the request has ended. So no key exceeds its limit by
asking for much at once. A refusal costs the key nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import re
import stat
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.errors import InputError
from toolkit.files.recipe import Name, Positive
from toolkit.files.strict import Strict, load_yaml, validate
from toolkit.serve.errors import ApiError, error_response

MAX_KEYS = 100  # each has its own metrics
HINT = "see llmctl docs how-to/serve, 'Several keys'"


Bounded = Annotated[Positive, Field(le=1 << 53)]  # beyond, a number of JSON is not exact


class ApiKey(Strict):
    """One client. Where a limit is None, only the server's own limits hold."""

    name: Name
    sha256: str = Field(
        description="of the key's bytes, without a line break: printf %s KEY | sha256sum"
    )
    requests_per_minute: Bounded | None = None
    tokens_per_minute: Bounded | None = Field(default=None, description="prompt and output")
    max_concurrent: Bounded | None = Field(
        default=None,
        description="choices of waiting and running requests: a request for n counts n times",
    )
    urgent: bool = Field(default=False, description="whether it may ask for a negative `priority`")

    @field_validator("sha256", mode="before")
    @classmethod
    def _is_digest(cls, given: object) -> object:
        # pydantic's own message would show the given value, which may be the key itself.
        if not (isinstance(given, str) and re.fullmatch(r"[0-9a-f]{64}", given)):
            raise ValueError("should be 64 hexadecimal digits, from: printf %s KEY | sha256sum")
        if given == hashlib.sha256(b"").hexdigest():
            raise ValueError("this is the sha256 of empty input")
        return given


class KeysFile(Strict):
    """All clients that may call."""

    keys: Annotated[list[ApiKey], Field(min_length=1, max_length=MAX_KEYS)]

    @model_validator(mode="after")
    def _names_and_keys_are_unique(self) -> KeysFile:
        names: set[str] = set()
        owners: dict[str, str] = {}
        for key in self.keys:
            if key.name in names:
                raise ValueError(f"two keys are called '{key.name}'")
            if key.sha256 in owners:
                raise ValueError(f"'{owners[key.sha256]}' and '{key.name}' have the same key")
            names.add(key.name)
            owners[key.sha256] = key.name
        return self


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises `InputError` for a file that is not a keys file or that every user may write to.
    """
    data = load_yaml(path)
    if path.stat().st_mode & stat.S_IWOTH:
        raise InputError(
            f"{path.name}: every user of this machine may write to it", f"chmod o-w {path}"
        )
    if not isinstance(data, dict):
        raise InputError(
            f"{path.name}: it holds no list of keys", f"it starts with `keys:`; {HINT}"
        )
    return tuple(validate(KeysFile, json.dumps(data), path, HINT).keys)


MINUTE_S = 60.0
Callers = tuple[str, tuple[ApiKey, ...]]  # the one shared key, or several keys
Limit = Literal["requests", "tokens", "concurrent"]
LIMITS: tuple[Limit, ...] = ("requests", "tokens", "concurrent")
_ACCOUNT = "toolkit.account"  # in an ASGI scope
_SCOPE_KEY = "toolkit.keyed_request"
UNKEYED = "without a key this server"
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, eq=False)
class AccessGate:
    """The ASGI layer before all routes. It denies by default, and gives responses a request id.

    Without a key only `open_paths` and `local_paths` answer, and a client cannot learn which other
    routes exist. Requests with POST count against the limits of their key, on the clock `now_s`.

    A Host that is a name other than `localhost` gets 403 from `local_paths`, and with
    `local_hosts_only` from all routes but `open_paths`. This protects a server of this machine
    without a key: a web page may point a name of its own to this machine ("DNS rebinding"), and the
    browser then sends that name and lets the page read the answers.
    """

    app: ASGIApp
    keyring: Keyring
    now_s: Callable[[], float]
    open_paths: Collection[str]
    local_paths: Collection[str]
    local_hosts_only: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        status = 0
        account = self.keyring.find(headers)
        keyed = None
        # The client's request id, if it is plain, only goes back in a header.
        client_id = headers.get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["X-Request-Id"] = request_id
                added.update(keyed.headers() if keyed else {})
            await send(message)

        is_local = scope["path"] in self.local_paths
        is_open = is_local or scope["path"] in self.open_paths
        try:
            if is_local or (self.local_hosts_only and not is_open):
                what = "the status page" if is_local else UNKEYED
                check_local_host(headers.get("host", ""), what)
            if account is None and not is_open:
                has_key = headers.get("authorization", "").lower().startswith("bearer ")
                missing = "this server needs its API key, as 'Authorization: Bearer KEY'"
                raise ApiError(
                    "the API key is not one of this server's" if has_key else missing,
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope[_ACCOUNT] = account
            if account is not None and scope["method"] == "POST":
                keyed = KeyedRequest(account, self.now_s)
                keyed.enter(scope)
        except ApiError as refusal:
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if keyed:
                keyed.leave(status)


def check_local_host(host: str, what: str = UNKEYED) -> None:
    """Raise `ApiError` for a Host that is a name other than localhost.

    Addresses and an empty Host pass, because no web page has them. `what` names what refuses.
    """
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    if not _is_local_name(name):
        raise ApiError(
            f"{what} answers to addresses and to localhost, not to the Host {name[:80]!r}; "
            f"{'start it with an API key, or ' if what == UNKEYED else ''}"
            "have the proxy in front send an address as Host",
            status=403,
            code="host_refused",
        )


@lru_cache(256)
def _is_local_name(name: str) -> bool:
    """Whether a Host without its port is an address, localhost or nothing."""
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    return name.lower().rstrip(".") in ("localhost", "")


@dataclass(slots=True, eq=False)
class Account:
    """The usage and the limits of a key. The account without a name is shared and has no limits."""

    name: str = ""
    max_concurrent: float = math.inf
    urgent: bool = True
    requests: Bucket | None = None
    tokens: Bucket | None = None
    running: int = 0  # choices that run or wait
    accepted: int = 0  # requests
    taken_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by limit

    def limit(self, key: ApiKey) -> None:
        """Set the key's limits. Usage of a limit continues to count, unless its size changes."""
        self.max_concurrent = key.max_concurrent or math.inf
        self.urgent = key.urgent
        self.requests = _bucket(key.requests_per_minute, self.requests)
        self.tokens = _bucket(key.tokens_per_minute, self.tokens)


class Keyring:
    """The accounts of all keys. Without any key, all clients share one account."""

    def __init__(self, api_key: str = "", keys: Sequence[ApiKey] = ()) -> None:
        self._accounts: dict[str, Account] = {}  # by name, of removed keys too
        self.replace(api_key, keys)

    def replace(self, api_key: str, keys: Sequence[ApiKey]) -> None:
        """Accept these keys from now on, and no others.

        A name that stays, or returns, keeps its usage. Accepted requests are answered to their end.
        """
        self.named: list[Account] = []
        self._entries: list[tuple[str, Account]] = []  # the digests, in hexadecimal
        for key in keys:
            account = self._accounts.setdefault(key.name, Account(key.name))
            account.limit(key)
            self.named.append(account)
            self._entries.append((key.sha256, account))
        shared = self._accounts.setdefault("", Account())
        if api_key:
            self._entries.append((hashlib.sha256(api_key.encode()).hexdigest(), shared))
        self._keyless = None if self._entries else shared

    def renew(self, callers: Callers) -> str:
        """As `replace`. Returns a message about the change, which contains no key."""
        before = {account.name for account in self.named}
        self.replace(*callers)
        now = {account.name for account in self.named}
        if not now:
            return "the API key was read again"
        changes = {"new": now - before, "gone": before - now}
        listed = "".join(
            f"; {word}: {', '.join(sorted(names))}" for word, names in changes.items() if names
        )
        return f"the keys were read again: {len(now)}{listed}"

    def find(self, headers: Headers) -> Account | None:
        """The account of the request's key, or None. Compares all digests in constant time."""
        if self._keyless:
            return self._keyless
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
        owner = None
        for known, account in self._entries:
            if hmac.compare_digest(digest, known):
                owner = account
        return owner if scheme.lower() == "bearer" else None


def account_of(scope: Scope) -> Account:
    """The account of an ASGI scope that the gate let in with a key, or where there are no keys."""
    account: Account = scope[_ACCOUNT]
    return account


class KeyedRequest:
    """One request of a key, from its headers until its response has ended, on the clock `now_s`."""

    def __init__(self, account: Account, now_s: Callable[[], float]) -> None:
        self._account = account
        self._now_s = now_s
        self._choices = 0
        self._reserved = 0
        self._used: Callable[[], int] = lambda: 0

    @classmethod
    def of(cls, scope: Scope) -> KeyedRequest:
        """The keyed request of an ASGI scope."""
        keyed: KeyedRequest = scope[_SCOPE_KEY]
        return keyed

    def enter(self, scope: Scope) -> None:
        """Count the request. Raises `ApiError` if the key may not send one now."""
        account = self._account
        bucket = self._account.requests
        now_s = self._now_s()
        if bucket and (wait_s := bucket.wait_s(1, now_s)):
            text = f"sends at most {bucket.size} requests a minute"
            raise self._refusal("requests", text, wait_s)
        if account.running >= account.max_concurrent:
            raise self._too_many_choices(1)
        if bucket:
            bucket.take(1, now_s)
        account.accepted += 1
        scope[_SCOPE_KEY] = self

    def admit(self, choices: int, tokens: int) -> None:
        """Count choices with at least `tokens` in total. Raises `ApiError` if it is too much."""
        account = self._account
        if account.running + choices > account.max_concurrent:
            raise self._too_many_choices(choices)
        self._check_tokens(tokens)
        account.running += choices
        self._choices = choices

    def check_priority(self, priority: int) -> None:
        """Raise `ApiError` for a priority above the default, if the key may not ask for it."""
        if priority < 0 and not self._account.urgent:
            text = f"priority is {priority}; the key '{self._account.name}' may ask for 0 and above"
            raise ApiError(text, status=403, param="priority", code="priority_not_allowed")

    def reserve(self, tokens: int, used: Callable[[], int]) -> None:
        """Reserve tokens, or raise `ApiError`. At the end `used` returns the real number."""
        self._check_tokens(tokens)
        if self._account.tokens:
            self._account.tokens.take(tokens, self._now_s())
        self._reserved = tokens
        self._used = used

    def leave(self, status: int) -> None:
        """Give back what was not used. A request that got 429 or 503 does not count."""
        account = self._account
        now_s = self._now_s()
        used = self._used()
        self._used = lambda: 0  # it knows the request: a cycle, which only a collection would free
        account.running -= self._choices
        account.taken_tokens += used
        if account.tokens:
            account.tokens.give_back(self._reserved - used, now_s)
        if account.requests and status in (429, 503):
            account.requests.give_back(1, now_s)

    def headers(self) -> dict[str, str]:
        """Response headers with the remaining limits, under OpenAI's names."""
        headers = {}
        now_s = self._now_s()
        account = self._account
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket:
                left = max(math.floor(bucket.level(now_s)), 0)
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.size)
                headers[f"x-ratelimit-remaining-{name}"] = str(left)
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.wait_s(bucket.size, now_s))
        return headers

    def _check_tokens(self, tokens: int) -> None:
        bucket = self._account.tokens
        if bucket and (wait_s := bucket.wait_s(tokens, self._now_s())):
            text = (
                f"takes at most {bucket.size} tokens a minute, prompt and max_tokens of all "
                f"choices together; this request may take {tokens}"
            )
            raise self._refusal("tokens", text, wait_s)

    def _too_many_choices(self, choices: int) -> ApiError:
        account = self._account
        text = (
            f"has at most {account.max_concurrent} choices at once; {account.running} are there, "
            f"and this request asks for {choices}"
        )
        wait_s = math.inf if choices > account.max_concurrent else 1.0
        return self._refusal("concurrent", text, wait_s)

    def _refusal(self, limit: Limit, text: str, wait_s: float) -> ApiError:
        """An error that tells OpenAI's client how long to wait, or not to try again."""
        self._account.refused[limit] += 1
        if math.isinf(wait_s):
            remedy = "ask for less"
            headers = {"x-should-retry": "false"}
        else:
            remedy = f"try again in {_duration(wait_s)}"
            headers = {"Retry-After": str(math.ceil(wait_s))}
        return ApiError(
            f"rate limit reached: the key '{self._account.name}' {text}; {remedy}",
            status=429,
            kind="tokens" if limit == "tokens" else "requests",
            code="rate_limit_exceeded",
            headers=headers,
        )


def _bucket(per_minute: int | None, before: Bucket | None) -> Bucket | None:
    if before is not None and before.size == per_minute:
        return before
    return Bucket(per_minute) if per_minute else None


def _duration(seconds: float) -> str:
    """A duration in OpenAI's format: 250ms, 12s, 6m0s."""
    if (ms := math.ceil(1000 * seconds)) < 1000:
        return f"{ms}ms"
    whole = math.ceil(seconds)
    return f"{whole}s" if whole < MINUTE_S else f"{whole // 60}m{whole % 60}s"


class Bucket:
    """A token bucket that holds `per_minute` units and fills at that rate. It is full at first.

    So a key gets at most twice `per_minute` within any minute, and `per_minute` in the long run.
    """

    def __init__(self, per_minute: int) -> None:
        self.size = per_minute
        self._level = float(per_minute)
        self._at_s = 0.0

    def level(self, now_s: float) -> float:
        """The units in the bucket now. A clock that goes backwards adds nothing."""
        gained = max(now_s - self._at_s, 0.0) * self.size / MINUTE_S
        self._level = min(self._level + gained, self.size)
        self._at_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket has `amount` units, or infinity if it never has."""
        missing = amount - self.level(now_s)
        return math.inf if amount > self.size else max(missing, 0.0) * MINUTE_S / self.size

    def take(self, amount: float, now_s: float) -> None:
        """Remove units. The caller has checked `wait_s`."""
        self._level = self.level(now_s) - amount

    def give_back(self, amount: float, now_s: float) -> None:
        """Return units that were taken and not used."""
        self._level = min(self.level(now_s) + amount, self.size)
