"""Joining a Ray cluster that exists, or a local one that lasts as long as this process needs it,
and running functions on the cluster's processors.

Ray's own messages stay out of the output; an error while joining is one line that says what was
tried.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from toolkit.errors import InputError
from toolkit.extras import install

LOCAL = "local"
AUTO = "auto"
MIN_VERSION = (2, 54)  # of Ray: the first with RAY_AUTH_MODE=token on every connection
INSTALL = install("ray")
REACH_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 1 << 28  # of a local cluster, which carries only prompts and tokens
LOOPBACK = "127.0.0.1"
TOKEN = "RAY_AUTH_TOKEN"
TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
MODE = "RAY_AUTH_MODE"


@dataclass(slots=True, frozen=True)
class Cluster:
    """A cluster that this process has joined: HOST:PORT of its head, and its number of nodes."""

    address: str
    nodes: int


def check_address(address: str) -> str:
    """Return `address` if it is 'local', 'auto' or HOST:PORT; else raise `InputError`."""
    if address in (LOCAL, AUTO):
        return address
    if "://" in address:
        hint = "give the head's own address, HOST:6379, on a machine of the cluster"
        raise InputError(f"--ray {address}: Ray Client cannot stream tokens of workers", hint)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(
            f"--ray {address}: it must be 'local', 'auto' or HOST:PORT", "like --ray 10.0.0.1:6379"
        )
    return address


@contextmanager
def joined(address: str, cpus: float) -> Iterator[Cluster]:
    """Join a cluster until the block ends, or start one on this machine.

    Args:
        address: 'local' starts a cluster, without a dashboard and with a new token; 'auto' is
            RAY_ADDRESS, or the cluster that this machine belongs to; or HOST:PORT of a head, on a
            machine that belongs to its cluster.
        cpus: the CPUs of a local cluster, whatever the machine has.

    Raises:
        InputError: for an invalid address, a cluster that cannot be reached or refuses this
            process, or if Ray is not installed.
    """
    check_address(address)
    options: dict[str, Any] = {}
    has_token = bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH))
    if address == LOCAL:
        # Ray listens on every address of the machine: `ray.init` takes loopback for the machine's
        # own address. A token that only the cluster's processes know keeps others out.
        os.environ.setdefault(MODE, "token")
        if not has_token:
            os.environ[TOKEN] = secrets.token_hex(32)
        options = {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
        }
    elif has_token or (Path.home() / ".ray" / "auth_token").exists():
        # Ray uses a token only for an address that it found itself, not for one that was given.
        os.environ.setdefault(MODE, "token")
    ray = _load()  # Ray reads the environment now
    if address != LOCAL:
        address = _find(address)
    try:
        with _silent():
            context = ray.init(
                address, log_to_driver=False, logging_level=logging.CRITICAL, **options
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise _cannot_join(address, error) from None
    try:
        head = str(context.address_info["gcs_address"])
        nodes = ray.nodes()
        yield Cluster(head, sum(node["Alive"] for node in nodes))
    finally:
        ray.shutdown()


def _load() -> Any:
    """Ray, without its messages. Raises `InputError`, with how to install it, if it is missing or
    older than `MIN_VERSION`.
    """
    try:
        import ray
        from ray._private import worker
    except ImportError:
        raise InputError("--ray needs Ray, which is not installed", INSTALL) from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise InputError(
            f"Ray {ray.__version__} is installed; {oldest} is the oldest that works", INSTALL
        )
    # Messages about lost nodes would go to stdout, which belongs to the command.
    worker._worker_logs_enabled = False
    return ray


@contextmanager
def _silent() -> Iterator[None]:
    """Discard what Ray's C++ libraries write to file descriptor 2; errors are raised too."""
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _find(address: str) -> str:
    """HOST:PORT of a cluster. Raises `InputError` if none listens; Ray would retry for a minute."""
    if address == AUTO:
        from ray._private.services import canonicalize_bootstrap_address

        try:
            head = canonicalize_bootstrap_address(os.environ.get("RAY_ADDRESS") or AUTO)
        except (ConnectionError, ValueError):
            head = None
        if not head:
            tried = "RAY_ADDRESS is not set, and no Ray process runs on this machine"
            raise InputError(
                f"--ray auto: no cluster was found: {tried}", "ray start --head, or --ray local"
            )
        address = check_address(str(head))
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        tried = f"a TCP connection, for at most {REACH_TIMEOUT_S:g} s"
        raise InputError(
            f"no Ray cluster at {address}: {reason} (tried: {tried})",
            "see the address of its head there: ray status",
        ) from None
    return address


def _cannot_join(address: str, error: Exception) -> InputError:
    """Ray's message in one line, and the remedy."""
    message = f"{error.__cause__ or ''}\n{error}"
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = lines[0][:200] if lines else repr(error)
    if address == LOCAL:
        hint = "its logs: session_latest/logs in Ray's temporary folder"
        return InputError(f"cannot start a Ray cluster on this machine: {first}", hint)
    if "token" in message.lower() or "Unauthenticated" in message:
        hint = f"{MODE}=token, with the cluster's token in {TOKEN_PATH}'s file"
        return InputError(
            f"the Ray cluster at {address} refused the token, or no token is set", hint
        )
    hint = f"this machine must belong to it: ray start --address={address}"
    if "ersion mismatch" in message:
        hint = "install the cluster's versions of Ray and Python"
    return InputError(f"cannot join the Ray cluster at {address}: {first}", hint)


Item = TypeVar("Item")
Result = TypeVar("Result")


def processors() -> int:
    """The CPUs of the cluster that this process has joined."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def spread(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[tuple[Item, Result]]:
    """Run `function` on each item on the cluster. Yields each item and its result, as results come.

    At most `at_once` calls run or wait for a processor. Ray pickles the function by its name, the
    items and the results. Calls on a lost machine run again on another one. When the caller stops
    iterating, the remaining calls are cancelled.
    """
    import ray

    remote = ray.remote(num_cpus=1, max_retries=-1)(function)
    waiting = iter(items)
    running: dict[Any, Item] = {remote.remote(item): item for item in islice(waiting, at_once)}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            item = running.pop(done)
            running |= {remote.remote(other): other for other in islice(waiting, 1)}
            yield item, ray.get(done)
    finally:
        for call in running:
            ray.cancel(call)
