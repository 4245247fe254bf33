"""Where the list of replicas comes from: the command line, a file, or DNS.

`toolkit.server.watched` looks at it again every few seconds.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolkit.endpoints.upstream import Upstream, server_url
from toolkit.errors import InputError
from toolkit.server.watched import Watched, WatchedFile

MAX_REPLICAS = 1024
DNS_EVERY_S = 3.0
ANSWER_S = 10.0
MAX_FILE_BYTES = 1 << 20
HINT = "--replicas takes FILE or dns://NAME:PORT"


class WatchedName(Watched[list[str]]):
    """The URLs of all addresses of a name, as of a headless Service of Kubernetes or round-robin
    DNS. There is none before the first look: the name may be known only once a replica is there.
    """

    every_s = DNS_EVERY_S

    def __init__(self, name: str, port: int) -> None:
        super().__init__([])
        self._name = name
        self._port = port

    def changed(self) -> list[str] | None:
        urls = _addresses(self._name, self._port)
        if urls == self.value:
            return None
        self.value = urls
        return urls


def given_replicas(urls: Sequence[str]) -> Watched[list[str]]:
    """URLs of the command line. Raises `InputError` for one that cannot be used."""
    return Watched(once(map(_checked, urls)))


def _read_list(path: Path) -> list[str]:
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file", HINT)  # a pipe would wait
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path}: longer than {MAX_FILE_BYTES} bytes", HINT)
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"{path}: cannot be read: {why}", HINT) from None
    texts = [line.partition("#")[0].strip() for line in lines]
    urls = once(_checked(text) for text in texts if text)
    if not urls:  # it may be about to be written
        raise InputError(f"{path}: it lists no replica", HINT)
    if len(urls) > MAX_REPLICAS:
        why = f"{path}: {len(urls)} replicas; the limit is {MAX_REPLICAS}"
        raise InputError(why, "list fewer")
    return urls


def _addresses(name: str, port: int) -> list[str]:
    try:
        addresses = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        why = f"{name}: cannot be resolved: {reason}"
        raise InputError(why, "check the name in --replicas") from None
    hosts = {str(address[0]) for *_, address in addresses}
    urls = sorted(f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts)
    return urls[:MAX_REPLICAS]


def listed_replicas(text: str) -> Watched[list[str]]:
    """The list that `--replicas` names: a file with a URL a line, or a name. Raises InputError for
    one that cannot be used.
    """
    scheme, has_scheme, rest = text.partition("://")
    if not has_scheme:
        return WatchedFile(Path(text), _read_list)
    name = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
    if scheme == "dns" and (found := re.fullmatch(rf"({name}):(\d{{1,5}})", rest)):
        port = int(found[3])
        if not 0 < port < 65536:
            raise InputError(f"--replicas {text}: {port} is not a port", "1 to 65535")
        return WatchedName(found[1], port)
    if scheme in ("http", "https"):
        raise InputError(f"--replicas {text}: this is one replica", f"give it as --replica; {HINT}")
    raise InputError(f"--replicas {text}: not a list of replicas", HINT)


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
