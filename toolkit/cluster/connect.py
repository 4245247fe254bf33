"""The way into a Ray cluster: one that exists, or one of this machine that begins and ends with us.

Ray's own messages are kept off our output; what goes wrong on the way in is one line that says what
was tried.
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

LOCAL, AUTO = "local", "auto"
OLDEST = (2, 54)  # of Ray: the first whose every connection honours RAY_AUTH_MODE=token
INSTALL = "pip install 'llmctl[ray]'"
REACH_TIMEOUT_S = 5.0
OBJECT_STORE_BYTES = 1 << 28  # of a cluster of ours: prompts and tokens are all that it carries
LOOPBACK = "127.0.0.1"
TOKEN, TOKEN_PATH, MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"


@dataclass(slots=True, frozen=True)
class Cluster:
    """A cluster that this process has joined."""

    address: str  # HOST:PORT of its head
    nodes: int
    guarded: bool  # it is entered with a token


def check_address(address: str) -> str:
    """`address` if it is 'local', 'auto' or HOST:PORT; `InputError` otherwise."""
    if address in (LOCAL, AUTO):
        return address
    if "://" in address:
        hint = "give the head's own address, HOST:6379, on a machine of the cluster"
        raise InputError(f"--ray {address}: Ray Client cannot stream what workers say", hint)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(
            f"--ray {address}: it is 'local', 'auto' or HOST:PORT", "like --ray 10.0.0.1:6379"
        )
    return address


@contextmanager
def joined(address: str, cpus: float) -> Iterator[Cluster]:
    """Join a cluster until the block ends, or start one on this machine.

    Args:
        address: 'local' starts one, without a dashboard, with a new token; 'auto' is RAY_ADDRESS, or the cluster that
            this machine belongs to; or HOST:PORT of a head, on a machine that belongs to it.
        cpus: what a cluster of ours says it has, whatever the machine has.

    Raises:
        InputError: for what is no address, a cluster that cannot be reached or that refuses us, or without Ray.
    """
    check_address(address)
    options: dict[str, Any] = {}
    if address == LOCAL:
        _guard()
        options = {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "_node_ip_address": LOOPBACK,
        }
    else:
        _take_token()
    ray = _load()  # it reads the environment as it is now
    if address != LOCAL:
        address = _find(address)
        _reach(address)
    try:
        with _silent():
            context = ray.init(
                address, log_to_driver=False, logging_level=logging.CRITICAL, **options
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise _cannot_join(address, error) from None
    try:
        nodes = sum(node["Alive"] for node in ray.nodes())
        yield Cluster(
            str(context.address_info["gcs_address"]),
            nodes,
            os.environ.get(MODE, "").lower() == "token",
        )
    finally:
        ray.shutdown()


def _load() -> Any:
    """Ray, from 2.54 on, and silent. `InputError` that says how to install it."""
    try:
        import ray
        from ray._private import worker
    except ImportError:
        raise InputError("--ray needs Ray, which is not installed", INSTALL) from None
    if tuple(map(int, ray.__version__.split(".")[:2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(
            f"Ray {ray.__version__} is installed; {oldest} is the oldest that works", INSTALL
        )
    worker._worker_logs_enabled = (
        False  # news of lost nodes would go to stdout, which is the command's
    )
    return ray


@contextmanager
def _silent() -> Iterator[None]:
    """Ray's libraries in C++ write to file descriptor 2, a line with each retry; what is wrong is
    raised, too.
    """
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def _guard() -> None:
    """A cluster of ours has a token: the environment's, or a new one that only our processes know.

    Ray listens on every address of the machine: `ray.init` takes loopback for the machine's own
    address. The token is what keeps others out.
    """
    os.environ.setdefault(MODE, "token")
    if not (os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)):
        os.environ[TOKEN] = secrets.token_hex(32)


def _take_token() -> None:
    """Ray uses the token that there is where an address was found; here also where one was given."""
    known = (
        os.environ.get(TOKEN)
        or os.environ.get(TOKEN_PATH)
        or (Path.home() / ".ray" / "auth_token").exists()
    )
    if known:
        os.environ.setdefault(MODE, "token")


def _find(address: str) -> str:
    """HOST:PORT of what 'auto' means."""
    if address != AUTO:
        return address
    from ray._private.services import canonicalize_bootstrap_address

    try:
        found = canonicalize_bootstrap_address(os.environ.get("RAY_ADDRESS") or AUTO)
    except (ConnectionError, ValueError):
        found = None
    if not found:
        tried = "RAY_ADDRESS is not set, and no Ray process runs on this machine"
        raise InputError(
            f"--ray auto: no cluster was found: {tried}", "ray start --head, or --ray local"
        )
    return check_address(str(found))


def _reach(address: str) -> None:
    """Ray would try for a minute and say little."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or "no answer"
        tried = f"a TCP connection, for at most {REACH_TIMEOUT_S:g} s"
        raise InputError(
            f"no Ray cluster at {address}: {reason} (tried: {tried})",
            "its head says its address: ray status",
        ) from None


def _cannot_join(address: str, error: Exception) -> InputError:
    """What Ray says, in one line, and what to do about it."""
    lines = [
        line.strip()
        for one in (error.__cause__, error)
        if one
        for line in str(one).splitlines()
        if line.strip()
    ]
    said, first = " ".join(lines), lines[0][:200] if lines else repr(error)
    if address == LOCAL:
        hint = "its logs: session_latest/logs in Ray's temporary folder"
        return InputError(f"cannot start a Ray cluster on this machine: {first}", hint)
    if "token" in said.lower() or "Unauthenticated" in said:
        hint = f"{MODE}=token, with the cluster's token in {TOKEN_PATH}'s file"
        return InputError(
            f"the Ray cluster at {address} did not take our token, or we have none", hint
        )
    if "ersion mismatch" in said:
        hint = "install the Ray and the Python of the cluster"
    else:
        hint = f"this machine must belong to it: ray start --address={address}"
    return InputError(f"cannot join the Ray cluster at {address}: {first}", hint)


# Functions run on the processors of the cluster, for whoever has many independent things to
# compute.

Item = TypeVar("Item")
Result = TypeVar("Result")


def processors() -> int:
    """The CPUs of the cluster that this process has joined."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def spread(
    function: Callable[[Item], Result], items: Iterable[Item], at_once: int
) -> Iterator[tuple[Item, Result]]:
    """Each item and what `function` makes of it, as results come; at most `at_once` run or wait for
    a processor.

    Ray pickles the function, by its name, the items and the results. What a lost machine had is run
    again elsewhere; what is left when nobody asks for more is cancelled.
    """
    import ray

    remote = ray.remote(num_cpus=1, max_retries=-1)(function)
    waiting = iter(items)
    running: dict[Any, Item] = {remote.remote(item): item for item in islice(waiting, at_once)}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            item = running.pop(done)
            running |= {remote.remote(one): one for one in islice(waiting, 1)}
            yield item, ray.get(done)
    finally:
        for left in running:
            ray.cancel(left)
