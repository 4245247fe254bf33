"""What a server looks at again while it runs: a file of keys, and the list of replicas, of a file
or of a name in DNS.

`follow` reads files once a second, so it does not matter how one is changed. If something cannot be
read, the last good version stays in force and one warning is printed for each problem.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from toolkit.endpoints.upstream import Upstream, server_url
from toolkit.errors import InputError, LlmctlError
from toolkit.files.strict import read_bytes

CHECK_EVERY_S = 1.0
ValueT = TypeVar("ValueT")


class Watched(Generic[ValueT]):
    """A value that may change while the server runs.

    Args:
        look: reads it again; None: it never changes.

    Attributes:
        value: as it was read last.
        every_s: how often it is read.
    """

    def __init__(
        self,
        value: ValueT,
        look: Callable[[], ValueT] | None = None,
        every_s: float = CHECK_EVERY_S,
    ) -> None:
        self.value = value
        self.look = look
        self.every_s = every_s

    def changed(self) -> ValueT | None:
        """Look, which may take a while. Return the value if it changed, else None. Raises
        `InputError` if it cannot be read.
        """
        value = self.value if self.look is None else self.look()
        if value == self.value:
            return None
        self.value = value
        return value


def watched_file(file: Path, read: Callable[[Path], ValueT]) -> Watched[ValueT]:
    """Return what `read` makes of a file, now and later. Raises what `read` raises."""
    return Watched(read(file), partial(read, file))


async def follow(
    watched: Watched[ValueT], take: Callable[[ValueT], str], say: Callable[[str], None]
) -> None:
    """Look now, and again and again; `take` gets each new value, and returns a message about the
    change. Returns only if the value never changes.
    """
    problem = ""
    while watched.look is not None:
        before = problem
        problem = message = ""
        try:
            # In a thread: to look a name up, or to read a long list, would pause all streams.
            value = await asyncio.to_thread(watched.changed)
            message = "" if value is None else take(value)
        except LlmctlError as error:
            problem = f"warning: {error.message}; the version read before stays in force"
        if told := message or (problem if problem != before else ""):
            with suppress(OSError):  # stderr is closed at the other end
                say(told)
        await asyncio.sleep(watched.every_s)


MAX_REPLICAS = 1024
DNS_EVERY_S = 3.0
ANSWER_S = 10.0
HINT = "--replica takes URLs, or one FILE or dns://NAME:PORT"


def given_replicas(urls: Sequence[str]) -> Watched[list[str]]:
    """URLs of the command line. Raises `InputError` for one that cannot be used."""
    return Watched(list(dict.fromkeys(map(_checked, urls))))


def _read_list(path: Path) -> list[str]:
    if path.is_fifo():
        raise InputError(f"{path}: not a regular file", HINT)  # a pipe would wait
    lines = read_bytes(path, HINT, 1 << 20).decode(errors="replace").splitlines()
    texts = [line.partition("#")[0].strip() for line in lines]
    urls = list(dict.fromkeys(_checked(text) for text in texts if text))
    if not urls:  # it may be about to be written
        raise InputError(f"{path}: it lists no replica", HINT)
    if len(urls) > MAX_REPLICAS:
        why = f"{path}: {len(urls)} replicas; the limit is {MAX_REPLICAS}"
        raise InputError(why, "list fewer")
    return urls


def _addresses(name: str, port: int) -> list[str]:
    """Return the URLs of all addresses of a name, as of a headless Service of Kubernetes or
    round-robin DNS.
    """
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        why = f"{name}: cannot be resolved: {reason}"
        raise InputError(why, "check the name in --replica") from None
    hosts = {str(address[0]) for *_, address in addresses}
    urls = sorted(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts)
    return urls[:MAX_REPLICAS]


def listed_replicas(text: str) -> Watched[list[str]]:
    """The list that `--replica` names: a file with a URL a line, or a name. Raises InputError for
    one that cannot be used.
    """
    if "://" not in text:
        return watched_file(Path(text), _read_list)
    found = re.fullmatch(r"dns://([A-Za-z0-9][A-Za-z0-9.-]{0,252}):(\d{1,5})", text)
    if found is None or not 0 < int(found[2]) < 65536:
        raise InputError(f"--replica {text}: not a list of replicas", HINT)
    # None before the first look: the name may be known only once a replica is there.
    return Watched([], partial(_addresses, found[1], int(found[2])), DNS_EVERY_S)


def _checked(url: str) -> str:
    """Return a replica's URL in one spelling: scheme and host in lower case, without the default
    port, a last slash and /v1. Raises `InputError` for what no request can be sent to.
    """
    Upstream(url if not url.lower().startswith("https") else "http" + url[5:], ANSWER_S)
    return str(server_url(url)).rstrip("/").removesuffix("/v1")
