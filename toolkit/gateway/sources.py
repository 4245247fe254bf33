"""Where the list of replicas comes from: the command line, a file, DNS, or Kubernetes.

A source is read again every few seconds, or when Kubernetes reports a change. While it cannot be
read, the list stays as it was.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from toolkit.endpoints.foreign import UNREADABLE, decoded
from toolkit.endpoints.target import server_url
from toolkit.endpoints.upstream import Upstream, UpstreamAnswer, UpstreamError
from toolkit.errors import InputError
from toolkit.files.recipe import NAME_PATTERN
from toolkit.serve.server import WatchedFiles

MAX_REPLICAS = 1024
FILE_EVERY_S = 1.0
DNS_EVERY_S = 3.0
WATCH_S = 290  # then the API server ends a watch, which begins again
PAUSE_S = 0.5
PAUSE_MAX_S = 30.0  # before a watch or a list that failed is tried again
ANSWER_S = 10.0
MAX_LIST_BYTES = 64 << 20  # of EndpointSlices, and of one change of them
MAX_FILE_BYTES = 1 << 20
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RIGHTS = "its service account needs `list` and `watch` on endpointslices of discovery.k8s.io"
HINT = "--replicas takes FILE, dns://NAME:PORT or k8s://NAMESPACE/SERVICE:PORT"


class ReplicaSource(Protocol):
    """A list of replicas that may change. Each is a URL, or of a fleet KIND=URL."""

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


class SeveralSources(ReplicaSource):
    """The replicas of several sources; those of one that has a kind are of this kind."""

    def __init__(self, sources: Sequence[tuple[str, ReplicaSource]]) -> None:
        self._sources = sources
        self._waits: dict[asyncio.Future[bool], ReplicaSource] = {}

    async def wait(self) -> bool:
        if not self._waits:
            self._waits = {asyncio.ensure_future(one.wait()): one for _, one in self._sources}
        try:
            while self._waits:
                await asyncio.wait(self._waits, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in self._waits if task.done()]:
                    source = self._waits.pop(task)
                    if task.result():
                        self._waits[asyncio.ensure_future(source.wait())] = source
                        return True
        except asyncio.CancelledError:
            for task in self._waits:
                task.cancel()
            raise
        return False

    async def read(self) -> list[str]:
        listed = []
        for kind, source in self._sources:
            urls = await source.read()
            listed += [f"{kind}={url}" if kind and "=" not in url else url for url in urls]
        return listed


class ListedReplicas(ReplicaSource):
    """A file with one URL, or KIND=URL, a line; `#` begins a comment."""

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


class _Conditions(msgspec.Struct, frozen=True):
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str]
    conditions: _Conditions = _Conditions()


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None


class _Slices(msgspec.Struct):
    items: list[_Slice]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Change(msgspec.Struct):
    type: str
    object: _Slice  # of type ERROR: a Status, of which nothing is read


class SlicedReplicas(ReplicaSource):
    """The endpoints of a Kubernetes Service, from its EndpointSlices: listed once, then watched.

    The pod's service account needs `list` and `watch` on `endpointslices` of `discovery.k8s.io`.
    A pod that is about to end gets no more requests: endpoints that terminate are left out, unless
    all do and some still serve. The gateway's own probes find out which are ready. A watch that
    ends goes on from its last version; if the API server has forgotten that (410), all is listed
    again. After a failure the pause before the next attempt doubles, from `PAUSE_S` to
    `PAUSE_MAX_S`.
    """

    def __init__(
        self, namespace: str, service: str, port: int, *, api: str = "", account: Path = ACCOUNT
    ) -> None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        if not api and not host:
            raise InputError(
                "--replicas k8s://: KUBERNETES_SERVICE_HOST is not set: this is no pod",
                "outside a cluster, give a FILE or --replica URL",
            )
        if not api:
            where = f"[{host}]" if ":" in host else host
            api = f"https://{where}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
        authorities = account / "ca.crt" if api.startswith("https:") else None
        self._server = partial(Upstream, api, WATCH_S + ANSWER_S, authorities)
        self._server()  # raises for a URL or a certificate that cannot be used
        self._account = account
        self._port = port
        self._where = f"{namespace}/{service}"
        slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._path = f"{slices}?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        self._slices: dict[str, _Slice] = {}
        self._version = ""  # of the slices that are known; '': they are to be listed
        self._changes: AsyncGenerator[None, None] | None = None  # a watch that goes on
        self._pause_s = 0.0

    async def wait(self) -> bool:
        await asyncio.sleep(self._pause_s)
        if not self._version:
            return True
        changes = self._changes = self._changes or self._watch()
        try:
            await anext(changes)
        except StopAsyncIteration:
            self._changes = None
            self._pause_s = PAUSE_S
        except (UpstreamError, InputError, *UNREADABLE):
            self._changes = None
            self._fail()
        return True

    async def read(self) -> list[str]:
        if not self._version:
            self._fail()  # unless they can be listed
            try:
                async with asyncio.timeout(ANSWER_S), self._asked("") as answer:
                    body = await answer.read(MAX_LIST_BYTES)
                if answer.status != 200:
                    why = f"the API server answered {answer.status} for {self._where}"
                    raise InputError(why, RIGHTS)
                slices = decoded(body, _Slices)
            except (TimeoutError, UpstreamError):
                slices = None
            if slices is None:
                why = f"the API server gave no EndpointSlices of {self._where}"
                raise InputError(why, RIGHTS) from None
            self._slices = {one.metadata.name or str(k): one for k, one in enumerate(slices.items)}
            self._version = slices.metadata.resource_version or "0"
            self._pause_s = 0.0
        endpoints = [one for part in self._slices.values() for one in part.endpoints or ()]
        staying = [one for one in endpoints if not one.conditions.terminating]
        serving = [one for one in endpoints if one.conditions.serving]  # until others are there
        addresses = {address for one in staying or serving for address in one.addresses}
        return sorted(_url(address, self._port) for address in addresses)[:MAX_REPLICAS]

    def _fail(self) -> None:
        self._pause_s = min(max(2 * self._pause_s, PAUSE_S), PAUSE_MAX_S)

    async def _watch(self) -> AsyncGenerator[None, None]:
        """Yield after each change until the watch ends; it clears `_version` if that is too old."""
        watch = f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
        async with self._asked(f"{watch}&resourceVersion={self._version}") as answer:
            if answer.status == 410:
                self._version = ""
                return
            if answer.status != 200:
                raise InputError(f"the API server answered {answer.status} for {self._where}")
            rest = b""
            async for piece in answer.body():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > MAX_LIST_BYTES:
                    raise InputError(f"the API server sent too long a change of {self._where}")
                for line in filter(None, lines):
                    change = msgspec.json.decode(line, type=_Change)
                    changed = change.object
                    metadata = change.object.metadata
                    match change.type:
                        case "ERROR":
                            self._version = ""
                            return
                        case "ADDED" | "MODIFIED":
                            self._slices[metadata.name] = changed
                        case "DELETED":
                            self._slices.pop(metadata.name, None)
                    self._version = metadata.resource_version
                if lines:
                    self._pause_s = 0.0
                    yield

    @asynccontextmanager
    async def _asked(self, query: str) -> AsyncIterator[UpstreamAnswer]:
        headers = [(b"accept", b"application/json")]
        with suppress(OSError):  # a token is replaced while the pod runs
            token = (self._account / "token").read_text(encoding="ascii").strip()
            headers.append((b"authorization", f"Bearer {token}".encode("ascii")))
        path = (self._path + query).encode("ascii")
        async with self._server() as api, aclosing(await api.send("GET", path, headers)) as answer:
            yield answer


def replica_source(texts: Sequence[str]) -> ReplicaSource:
    """The source that `--replicas` options name, each SOURCE or KIND=SOURCE. Raises `InputError`
    for one that cannot be used.
    """
    listed = [(kind, _source(rest)) for kind, rest in map(split_kind, texts)]
    return listed[0][1] if len(listed) == 1 and not listed[0][0] else SeveralSources(listed)


def split_kind(text: str) -> tuple[str, str]:
    """The kind, and the URL or source, of KIND=URL; '' for one without a kind."""
    name, mark, rest = text.partition("=")
    return (name, rest) if mark and re.fullmatch(NAME_PATTERN, name) else ("", text)


def _source(text: str) -> ReplicaSource:
    scheme, has_scheme, rest = text.partition("://")
    if not has_scheme:
        return ListedReplicas(Path(text))
    name = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
    if scheme == "dns" and (found := re.fullmatch(rf"({name}):(\d{{1,5}})", rest)):
        return NamedReplicas(found[1], _port(found[3], text))
    if scheme == "k8s" and (found := re.fullmatch(rf"({name})/({name}):(\d{{1,5}})", rest)):
        return SlicedReplicas(found[1], found[3], _port(found[5], text))
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
    kind, url = split_kind(text)
    Upstream(url if not url.lower().startswith("https") else "http" + url[5:], ANSWER_S)
    return f"{kind}={spelled(url)}" if kind else spelled(url)


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
    found: dict[tuple[str, str], str] = {}
    for text in urls:
        kind, url = split_kind(text)
        found.setdefault((kind, re.sub(r"(?<=://)localhost(?=[:/]|$)", "127.0.0.1", url)), text)
    return list(found.values())


def _port(text: str, source: str) -> int:
    if not 0 < int(text) < 65536:
        raise InputError(f"--replicas {source}: {text} is not a port", "1 to 65535")
    return int(text)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
