"""Access to the server: API keys, and the hosts by which it answers.

Clients are not told apart. How much one may use is decided by a proxy in front
(docs/how-to/expose.md).
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers

from toolkit.errors import InputError
from toolkit.files.strict import read_bytes
from toolkit.openai.errors import ApiError

HINT = "it has a key on each line; see docs/how-to/serve.md, 'Keys'"
UNKEYED = "without a key this server"
Keys = tuple[str, ...]  # any of them is accepted; (): none is asked for


def read_keys(path: Path) -> Keys:
    """Return the keys of a file, one on each line; lines that begin with # are none.

    Raises InputError if it cannot be read, holds no key or something else, or if every user may
    write to it. The message holds no key.
    """
    lines = [line.strip() for line in read_bytes(path, HINT).splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if path.stat().st_mode & stat.S_IWOTH:
        text = f"{path.name}: every user of this machine may write to it"
        raise InputError(text, f"chmod o-w {path}")
    if not keys:
        raise InputError(f"{path.name}: it holds no API key", HINT)
    if any(not re.fullmatch(rb"[!-9;-~]+", key) for key in keys):
        text = f"{path.name}: a key holds a space, a colon or what is not ASCII text"
        raise InputError(text, HINT)
    return tuple(dict.fromkeys(key.decode("ascii") for key in keys))


def digests_of(keys: Iterable[str]) -> set[str]:
    """Return what `check_key` compares. The digest of a long random key gives away nothing by the
    time of its search.
    """
    return {hashlib.sha256(key.encode()).hexdigest() for key in keys}


def check_key(headers: Headers, digests: set[str]) -> None:
    """Raise ApiError for a request without one of these keys."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    has_key = scheme.lower() == "bearer" and key != ""
    if has_key and hashlib.sha256(key.strip().encode("latin-1")).hexdigest() in digests:
        return
    missing = "this server needs its API key, as 'Authorization: Bearer KEY'"
    raise ApiError(
        "the API key is not one of this server's" if has_key else missing,
        status=401,
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def check_local_host(host: str, what: str = UNKEYED) -> None:
    """Raise ApiError for a Host that is a name other than localhost.

    Addresses and an empty Host pass, because no web page has them. `what` names what refuses.
    """
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return
    if name.lower().rstrip(".") not in ("localhost", ""):
        raise ApiError(
            f"{what} answers to addresses and to localhost, not to the Host {name[:80]!r}; "
            f"{'start it with an API key, or ' if what == UNKEYED else ''}"
            "have the proxy in front send an address as Host",
            status=403,
            code="host_refused",
        )
