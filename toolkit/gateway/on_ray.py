"""Replicas on the machines of a Ray cluster: `StartsReplicas` for a front that keeps its own.

The engine's backend starts each server in an actor on its machine, as it would start it here. The
machine gets the plan as JSON and a few words; it needs the same llmctl, and the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from toolkit.backends import ServerOrder, StartsReplicas, backend_of
from toolkit.cluster.connect import LOCAL, LOOPBACK, joined
from toolkit.cluster.places import WorkerPlacement, places, refuse_local_fleet
from toolkit.cluster.servers import HostedServer, RayServers, ServerSeat
from toolkit.errors import InputError
from toolkit.files.io import file_text
from toolkit.files.plan import Plan
from toolkit.serve.server import Ending


@dataclass(slots=True, frozen=True)
class DistantOrder:
    """A server to start on another machine: what it needs of a `ServerOrder`.

    Attributes:
        plan: of its kind alone, as JSON.
        timeout_s: what running requests get when it ends.
        accepts_foreign: it starts with a warning where its engine is not the fitted one.
    """

    plan: str
    served_model: str
    api_key: str = field(repr=False)
    timeout_s: float
    accepts_foreign: bool


def start_there(
    order: DistantOrder, seat: ServerSeat, folder: Path
) -> tuple[HostedServer, list[str]]:
    """Start the server on this machine, inside an actor. Returns it with warnings.

    Raises as `StartsReplicas.replica` of the plan's engine.
    """
    plan = Plan.model_validate_json(order.plan)
    warnings = list[str]()
    backend = backend_of(plan.recipe.engine.name)
    assert isinstance(backend, StartsReplicas)
    here = ServerOrder(
        plan,
        order.served_model,
        seat.host,
        0,
        Ending(timeout_s=order.timeout_s),
        order.api_key,
        on_foreign=warnings.append if order.accepts_foreign else None,
    )
    return backend.replica(here, 0, folder, seat), warnings


class RayReplicas:
    """`StartsReplicas` in the Ray cluster that was joined; `wanted` is the room of each server."""

    def __init__(self, servers: RayServers, wanted: Sequence[WorkerPlacement]) -> None:
        self._servers = servers
        self._wanted = wanted

    def replica(
        self, order: ServerOrder, number: int, folder: Path, seat: ServerSeat | None = None
    ) -> HostedServer:
        """See `StartsReplicas.replica`. It returns at once: what can fail there, fails in
        `wait_until_ready`. The server has a folder of its machine, and Ray's devices.

        Raises `InputError` for a plan that needs other room than the one before.
        """
        plan = order.plan
        share = places(plan.kinds)[number].share
        room = self._wanted[number].share
        if share != room:
            raise InputError(
                f"a server needs {share}, and has room for {room} in the Ray cluster",
                "restart llmctl serve for that",
            )
        distant = DistantOrder(
            file_text(plan.alone(plan.kind_numbers[number])),
            order.served_model,
            order.api_key,
            order.ending.timeout_s,
            order.on_foreign is not None,
        )
        say = order.on_foreign or order.ending.say
        return self._servers.start(number, partial(start_there, distant), say)


@contextmanager
def replicas_on_ray(plan: Plan, address: str, room_timeout_s: float) -> Iterator[RayReplicas]:
    """Join the cluster at `address`, as `toolkit.cluster.connect.joined`, and reserve room for the
    plan's servers until the block ends.

    Raises `InputError` for a cluster that cannot be joined, and as `places.node_labels`.
    """
    refuse_local_fleet(plan.kinds, address)
    wanted = places(plan.kinds)
    host = LOOPBACK if address == LOCAL else ""
    with (
        joined(address, sum(place.share.cpus for place in wanted)),
        closing(RayServers(wanted, room_timeout_s, host)) as servers,
    ):
        yield RayReplicas(servers, wanted)
