"""What a fit cannot know of a running server, and the world of workers under such conditions.

A shared machine is not as fast as it was while it was profiled, and a client's way to the server
takes time that is in no law. `toolkit.bench.predict` learns both from a warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, geometric_mean

from toolkit.estimators.laws import WithOverhead
from toolkit.sim.worker import NO_DELAY, FrontDelay
from toolkit.sim.world import World


@dataclass(slots=True, frozen=True)
class ServerConditions:
    """What a warm-up shows of a running server.

    Every batch takes `slowdown` times the time that the scheduler believes. Where passes overlap
    their launches take `launch_slowdown` times as long (None: as all else), and `slowdown` is the
    GPU's. Clients see tokens later by the delay of the `front` (None: that of the fit). `finished`
    are the output lengths of earlier requests: Past-Future admits by them. Each arriving request
    adds `arrival_cost_s` to every static batch that runs then.
    """

    slowdown: float = 1.0
    front: FrontDelay | None = None
    finished: tuple[int, ...] = ()
    arrival_cost_s: float = 0.0
    launch_slowdown: float | None = None


AS_FITTED = ServerConditions()


def mean_conditions(several: Sequence[ServerConditions]) -> ServerConditions:
    """What several measurements of one server show together: the geometric mean of its speeds, and
    the mean of what its front and its arrivals cost.
    """
    fronts = [each.front for each in several if each.front is not None]
    front = None
    if fronts:
        first_s = fmean(each.first_s for each in fronts)
        front = FrontDelay(first_s, fmean(each.last_s for each in fronts))
    launches = [each.launch_slowdown for each in several if each.launch_slowdown is not None]
    return ServerConditions(
        geometric_mean(each.slowdown for each in several),
        front,
        several[-1].finished,
        fmean(each.arrival_cost_s for each in several),
        geometric_mean(launches) if launches else None,
    )


def in_conditions(world: World, conditions: ServerConditions) -> World:
    """The same workers under such conditions; their scheduler believes the fit. Static batches and
    rounds are slower by the same factor.
    """
    if conditions == AS_FITTED:
        return world
    front = world.front
    paged = world.paged
    rounds = world.rounds
    if paged is not None:
        paged = paged.slowed(conditions.slowdown, conditions.launch_slowdown)
    if rounds is not None:
        slow = WithOverhead(rounds.latency, 0.0, conditions.slowdown)
        rounds = replace(rounds, latency=slow, believed=rounds.latency)
    if conditions.front is not None:
        front = conditions.front
        rounds = rounds and replace(rounds, front=NO_DELAY)
    return replace(
        world,
        latency=WithOverhead(world.latency, 0.0, conditions.slowdown),
        believed=world.latency,
        rounds=rounds,
        front=front,
        arrival_cost_s=conditions.arrival_cost_s,
        paged=paged,
        finished=conditions.finished,
    )
