"""Access to the server: API keys, and the hosts by which it answers.

`read_callers` reads a file with one key, or the keys file, which names the clients. The keys file
holds sha256 digests instead of keys, so it may be read, mailed and kept in version control: keys
are long and random, unlike passwords, so a plain digest cannot be guessed back. Recipes and plans
do not name this file: they describe what is served and move between machines, while the clients
belong to the place of the server.

How much a client may use is decided by a proxy in front (docs/how-to/expose.md).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from starlette.datastructures import Headers
from starlette.types import Scope

from toolkit.errors import InputError
from toolkit.files.recipe import Name
from toolkit.files.strict import Strict, load_yaml, read_bytes, validate
from toolkit.openai.errors import ApiError

MAX_KEYS = 100  # each has its own metric
HINT = "see docs/how-to/serve.md, 'Keys'"
ACCOUNT = "toolkit.account"  # in an ASGI scope
UNKEYED = "without a key this server"


class ApiKey(Strict):
    """One client."""

    name: Name
    sha256: str = Field(
        description="of the key's bytes, without a line break: printf %s KEY | sha256sum"
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
    """Return the keys of a file.

    Raises InputError if it is not a keys file, or if every user may write to it.
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


Callers = tuple[str, tuple[ApiKey, ...]]  # the one shared key, or several keys


def read_callers(path: Path) -> Callers:
    """Return the key of a file that holds one word without a colon, else those of a keys file.

    Raises InputError for a file that cannot be read or is empty, and as `read_keys`.
    """
    words = read_bytes(path, HINT).split()
    if not words:
        raise InputError(f"{path.name}: it holds no API key", HINT)
    if len(words) > 1 or b":" in words[0]:
        return "", read_keys(path)
    if not words[0].isascii():
        raise InputError(f"{path.name}: its key is not ASCII text", HINT)
    return words[0].decode("ascii"), ()


@dataclass(slots=True, eq=False)
class Account:
    """A client with a key of the keys file. Without such a file, all clients share the account
    without a name.
    """

    name: str = ""
    urgent: bool = True  # may ask for a negative priority
    requests: int = 0  # with POST


class Keyring:
    """The accounts of all keys. Without any key, all clients share one account."""

    def __init__(self, callers: Callers) -> None:
        self._accounts: dict[str, Account] = {}  # by name, of removed keys too
        self.named: list[Account] = []
        self.renew(callers)

    def renew(self, callers: Callers) -> str:
        """Accept these keys from now on, and no others. Return a message about the change, which
        contains no key.

        A name that stays, or returns, keeps its count. Accepted requests are answered to their end.
        """
        api_key, keys = callers
        before = {account.name for account in self.named}
        self.named = [self._accounts.setdefault(key.name, Account(key.name)) for key in keys]
        self._owners: dict[str, Account] = {}  # by the digest of their key, in hexadecimal
        for key, account in zip(keys, self.named, strict=True):
            account.urgent = key.urgent
            self._owners[key.sha256] = account
        shared = self._accounts.setdefault("", Account())
        if api_key:
            self._owners[hashlib.sha256(api_key.encode()).hexdigest()] = shared
        self._keyless = None if self._owners else shared
        now = {account.name for account in self.named}
        changes = {"new": now - before, "gone": before - now}
        listed = "".join(
            f"; {word}: {', '.join(sorted(names))}" for word, names in changes.items() if names
        )
        return f"the keys were read again: {len(self._owners)}{listed}"

    def find(self, headers: Headers) -> Account | None:
        """Return the account of the request's key, or None. The digest of a long random key gives
        away nothing by the time of its search.
        """
        if self._keyless:
            return self._keyless
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("latin-1")).hexdigest()
        return self._owners.get(digest) if scheme.lower() == "bearer" else None


def refused_key(headers: Headers) -> ApiError:
    """Return the error for a request without a key of this server."""
    has_key = headers.get("authorization", "").lower().startswith("bearer ")
    missing = "this server needs its API key, as 'Authorization: Bearer KEY'"
    return ApiError(
        "the API key is not one of this server's" if has_key else missing,
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def account_of(scope: Scope) -> Account:
    """Return the account of an ASGI scope that the front let in with a key, or without keys."""
    account: Account = scope[ACCOUNT]
    return account


def check_priority(scope: Scope, priority: int) -> None:
    """Raise ApiError for a priority above the default, if the request's key may not ask for it."""
    account = account_of(scope)
    if priority < 0 and not account.urgent:
        text = f"priority is {priority}; the key '{account.name}' may ask for 0 and above"
        raise ApiError(text, status=403, param="priority", code="priority_not_allowed")


def check_local_host(host: str, what: str = UNKEYED) -> None:
    """Raise ApiError for a Host that is a name other than localhost.

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
    """Return whether a Host without its port is an address, localhost or nothing."""
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    return name.lower().rstrip(".") in ("localhost", "")
