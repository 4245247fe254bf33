"""A node of a Ray cluster that is told to end waits until nobody needs it: the preStop hook of
KubeRay's pods.

    python -m toolkit.cluster.linger worker       until no actor of ours runs on this machine
    python -m toolkit.cluster.linger head PORT    until those who were connected to the head's PORT have left

Kubernetes ends all pods of a deployment at once, and the front then drains for as long as requests
run: their workers, and the head by which Ray finds them, must outlive it. How long a hook may take
is the pod's grace period.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import psutil

EVERY_S = 0.5
ACTOR = "ray::WorkerActor"  # what Ray titles our actors' processes, the running call after it
MAPPED = "::ffff:"  # before an IPv4 address on a socket that takes both


def actors(titles: Iterable[str]) -> int:
    """How many of these processes' titles are those of our actors."""
    return sum(title.startswith(ACTOR) for title in titles)


def peers(connections: Iterable[tuple[int, str]], port: int, own: Iterable[str]) -> set[str]:
    """The other machines among `connections`, each the local port and the remote address of an open
    one.
    """
    here = {address.removeprefix(MAPPED) for address in own}
    return {address.removeprefix(MAPPED) for at, address in connections if at == port} - here


def wait(needed: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return as soon as nobody needs us."""
    while needed():
        sleep(EVERY_S)


def main(words: list[str]) -> None:
    """What the command line says."""
    match words:
        case ["worker"]:
            wait(lambda: actors(_titles()) > 0)
        case ["head", port] if port.isdecimal():
            there = _peers(
                int(port)
            )  # who comes later is of the next deployment, and waits for the next head
            wait(lambda: bool(there & _peers(int(port))))
        case _:
            sys.exit(f"linger {' '.join(words)}: it is 'worker', or 'head PORT'")


def _titles() -> list[str]:
    found = psutil.process_iter(["cmdline"])
    return [(process.info["cmdline"] or [""])[0] for process in found]


def _peers(port: int) -> set[str]:
    own = {address.address for each in psutil.net_if_addrs().values() for address in each}
    found = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
    return peers(
        [(one.laddr.port, one.raddr.ip) for one in found if one.laddr and one.raddr], port, own
    )


if __name__ == "__main__":
    main(sys.argv[1:])
