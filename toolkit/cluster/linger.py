"""The preStop hook of KubeRay's pods: a node of a Ray cluster that has to end waits until no other
node needs it.

    python -m toolkit.cluster.linger worker       until no actor of llmctl runs on this machine
    python -m toolkit.cluster.linger head PORT    until the machines that use the head's PORT now
                                                  have left

Kubernetes ends all pods of a deployment at once, and the front then drains for as long as requests
run. Their workers, and the head by which Ray finds them, must outlive the front. The pod's grace
period limits the hook.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable

import psutil

POLL_EVERY_S = 0.5
# Ray's titles of the actors' processes, before the running call
ACTOR_TITLES = ("ray::WorkerActor", "ray::ServerActor")
MAPPED_IPV4 = "::ffff:"  # prefix of an IPv4 address on a socket that takes both


def actors(titles: Iterable[str]) -> int:
    """The number of these process titles that belong to actors of workers and servers."""
    return sum(title.startswith(ACTOR_TITLES) for title in titles)


def peers(connections: Iterable[tuple[int, str]], port: int, own: Iterable[str]) -> set[str]:
    """The other machines that are connected to `port`.

    `connections` are the local ports and remote addresses of open connections; `own` are this
    machine's addresses.
    """
    here = {address.removeprefix(MAPPED_IPV4) for address in own}
    return {address.removeprefix(MAPPED_IPV4) for at, address in connections if at == port} - here


def wait(needed: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return as soon as `needed` is False."""
    while needed():
        sleep(POLL_EVERY_S)


def main(words: list[str]) -> None:
    """Wait as the command line says."""
    match words:
        case ["worker"]:
            wait(lambda: actors(_titles()) > 0)
        case ["head", port] if port.isdecimal():
            # Machines that connect later belong to the next deployment and its own head.
            connected = _peers(int(port))
            wait(lambda: bool(connected & _peers(int(port))))
        case _:
            sys.exit(f"linger {' '.join(words)}: it must be 'worker' or 'head PORT'")


def _titles() -> list[str]:
    processes = psutil.process_iter(["cmdline"])
    return [(process.info["cmdline"] or [""])[0] for process in processes]


def _peers(port: int) -> set[str]:
    own = {address.address for found in psutil.net_if_addrs().values() for address in found}
    connections = [
        (connection.laddr.port, connection.raddr.ip)
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.laddr and connection.raddr
    ]
    return peers(connections, port, own)


if __name__ == "__main__":
    main(sys.argv[1:])
