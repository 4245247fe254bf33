"""Where the list of replicas comes from: the command line, a file, or DNS.

A source is read again every few seconds. While it cannot be read, the list stays as it was.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from toolkit.endpoints.target import server_url
from toolkit.endpoints.upstream import Upstream
from toolkit.errors import InputError
from toolkit.serve.server import WatchedFiles

MAX_REPLICAS = 1024
FILE_EVERY_S = 1.0
DNS_EVERY_S = 3.0
ANSWER_S = 10.0
MAX_FILE_BYTES = 1 << 20
HINT = "--replicas takes FILE or dns://NAME:PORT"


class ReplicaSource(Protocol):
    """A list of the URLs of replicas, which may change."""

    async def wait(self) -> bool:
        """Wait until it may have changed; False: it never will."""
        ...

    async def read(self) -> list[str]:
        """The replicas now. Raises `InputError` if they cannot be known."""
        ...


class GivenReplicas(ReplicaSource):
    """URLs of the command line."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = once(map(_checked, urls))

    async def wait(self) -> bool:
        return False

    async def read(self) -> list[str]:
        return self._urls


class ListedReplicas(ReplicaSource):
    """A file with one URL a line; `#` begins a comment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles([path], self._read)

    async def wait(self) -> bool:
        await asyncio.sleep(FILE_EVERY_S)
        return True

    async def read(self) -> list[str]:
        self._files.changed()
        return self._files.value

    def _read(self) -> list[str]:
        try:
            if self._path.exists() and not self._path.is_file():
                raise InputError(f"{self._path}: not a regular file", HINT)  # a pipe would wait
            if self._path.stat().st_size > MAX_FILE_BYTES:
                raise InputError(f"{self._path}: longer than {MAX_FILE_BYTES} bytes", HINT)
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not text"
            raise InputError(f"{self._path}: cannot be read: {why}", HINT) from None
        texts = [line.partition("#")[0].strip() for line in lines]
        urls = once(_checked(text) for text in texts if text)
        if not urls:  # it may be about to be written
            raise InputError(f"{self._path}: it lists no replica", HINT)
        if len(urls) > MAX_REPLICAS:
            why = f"{self._path}: {len(urls)} replicas; the limit is {MAX_REPLICAS}"
            raise InputError(why, "list fewer")
        return urls


class NamedReplicas(ReplicaSource):
    """All addresses of a name, as a headless Service of Kubernetes or round-robin DNS has them."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    async def wait(self) -> bool:
        await asyncio.sleep(DNS_EVERY_S)
        return True

    async def read(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a name"
            why = f"{self._name}: cannot be resolved: {reason}"
            raise InputError(why, "check the name in --replicas") from None
        urls = sorted({_url(str(address[0]), self._port) for *_, address in addresses})
        return urls[:MAX_REPLICAS]


def replica_source(text: str) -> ReplicaSource:
    """The source that `--replicas` names. Raises `InputError` for one that cannot be used."""
    scheme, has_scheme, rest = text.partition("://")
    if not has_scheme:
        return ListedReplicas(Path(text))
    name = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
    if scheme == "dns" and (found := re.fullmatch(rf"({name}):(\d{{1,5}})", rest)):
        return NamedReplicas(found[1], _port(found[3], text))
    if scheme in ("http", "https"):
        raise InputError(f"--replicas {text}: this is one replica", f"give it as --replica; {HINT}")
    raise InputError(f"--replicas {text}: not a list of replicas", HINT)


async def follow_source(
    source: ReplicaSource,
    apply: Callable[[list[str]], str],
    say: Callable[[str], None],
    applied: Sequence[str] | None = None,
) -> None:
    """Read a source again and again, and apply each change, until cancelled.

    `applied` is what is in force; None: what the source says first.
    """
    applied = await source.read() if applied is None else list(applied)
    problem = ""
    while await source.wait():
        try:
            urls = await source.read()
            if urls != applied:
                say(apply(urls))
            applied = urls
            problem = ""
        except InputError as error:
            if error.message != problem:
                say(f"warning: {error.message}; the replicas stay as they are")
            problem = error.message


def _checked(text: str) -> str:
    """The replica in its one spelling. Raises `InputError` for what no request can be sent to."""
    Upstream(text if not text.lower().startswith("https") else "http" + text[5:], ANSWER_S)
    return spelled(text)


def spelled(url: str) -> str:
    """A replica's URL in one spelling: scheme and host in lower case, without the default port, a
    last slash and /v1. Raises `InputError` where it is no URL of a server.
    """
    return str(server_url(url)).rstrip("/").removesuffix("/v1")


def once(urls: Iterable[str]) -> list[str]:
    """These replicas without those that are the same server, in the first spelling of each.

    `localhost` is 127.0.0.1 here, and is still asked by its name: a certificate may have only that.
    No other name is resolved: what it stands for may change, and two names may lead to several
    servers behind one address.
    """
    found: dict[str, str] = {}
    for url in urls:
        found.setdefault(re.sub(r"(?<=://)localhost(?=[:/]|$)", "127.0.0.1", url), url)
    return list(found.values())


def _port(text: str, source: str) -> int:
    if not 0 < int(text) < 65536:
        raise InputError(f"--replicas {source}: {text} is not a port", "1 to 65535")
    return int(text)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
