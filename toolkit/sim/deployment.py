"""What serves and what is served: a deployment and a workload, which make a simulated world."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.files.tuning import Settings
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.routers import make_router, router_of
from toolkit.scaling.rules import scaling_rule
from toolkit.sched.policies import BUILT_IN, make_any
from toolkit.sched.protocols import AnyPolicy
from toolkit.sim.fleet import Fleet
from toolkit.sim.world import World, world_from_fit
from toolkit.traces.types import Trace


@dataclass(slots=True, frozen=True)
class Workload:
    """Requests, and how they come.

    Attributes:
        trace: the requests, with lengths that the engine takes.
        concurrency: requests at once; the next one of the trace starts when one ends. 0: they come
            at the trace's times.
        closed_loop: a session's turn comes when the turn before has ended and its client has
            thought about it; False: at the trace's times.
        finished: output lengths of requests that ended before, by which Past-Future admits.
    """

    trace: Trace
    concurrency: int = 0
    closed_loop: bool = True
    finished: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Deployment:
    """An engine as it was measured, on workers, under settings.

    Attributes:
        recipe: model, machine, targets, limits, and the number of workers.
        fit: the engine, as measured.
        settings: the policy, and the router before several replicas of a server.
        admission: targets by which the front of such replicas refuses requests.
        slowdown: factor of every batch time; the scheduler believes the fit.
    """

    recipe: Recipe
    fit: Fit
    settings: Settings
    admission: LatencyLimits = UNLIMITED
    slowdown: float = 1.0

    @classmethod
    def of(cls, recipe: Recipe, fit: Fit) -> Deployment:
        """Return the recipe's own settings. Its front refuses requests where the recipe bounds how
        many it may refuse.
        """
        own = recipe.policy
        settings = Settings(
            policy=own.name, parameters=own.parameters, replica_router=router_of(recipe)
        )
        bounded = recipe.tune.max_refused_percent is not None
        refuses = bounded and recipe.serve.admission == "targets"
        admission = LatencyLimits.of(recipe.sla) if refuses else UNLIMITED
        return cls(recipe, fit, settings, admission)

    @classmethod
    def of_plan(cls, plan: Plan) -> Deployment:
        """Return what a plan deploys. Replicas without a planned router get requests in turn."""
        recipe = plan.recipe.model_copy(update={"workers": plan.workers})
        router = None
        several = router_of(recipe) is not None or plan.settings.scaling is not None
        if several and plan.settings.policy in BUILT_IN:
            router = plan.settings.replica_router or RouterSpec()
        settings = plan.settings.model_copy(update={"replica_router": router})
        return replace(cls.of(recipe, plan.fit), settings=settings)

    @property
    def workers(self) -> int:
        """How many workers, or replicas of a server."""
        return self.recipe.workers

    @property
    def gpus(self) -> int:
        """The devices of all workers."""
        return self.workers * self.recipe.engine.tensor_parallel_size

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all workers; None without a price."""
        price = self.recipe.hardware.usd_per_hour
        return None if price is None else price * self.workers

    @property
    def refuses(self) -> bool:
        """Whether the front refuses requests by its forecast."""
        return self.settings.replica_router is not None and self.admission != UNLIMITED

    @property
    def one_server(self) -> bool:
        """Whether it cannot have more workers: a policy of ours runs inside one server."""
        server = traits_of(self.recipe.engine.name).server
        return server and self.settings.policy not in BUILT_IN

    def with_workers(self, workers: int) -> Deployment:
        """Return the same settings on this number of workers. Several replicas that have no router
        get the recipe's.
        """
        recipe = self.recipe.model_copy(update={"workers": workers})
        own = router_of(recipe)
        router = own and (self.settings.replica_router or own)
        settings = self.settings.model_copy(update={"replica_router": router})
        return replace(self, recipe=recipe, settings=settings)

    def policy(self) -> AnyPolicy:
        """Return the policy. Raises InputError for one that does not exist, and for parameters
        that it does not have.
        """
        return make_any(self.settings.policy, self.settings.parameters)

    def world(self, workload: Workload) -> World:
        """Return the world in which the deployment serves a workload.

        Raises InputError for a router that does not exist, and for caches that are not modelled.
        """
        recipe = self.recipe
        spec = self.settings.replica_router
        router = None if spec is None else make_router(spec.name, spec.parameters)
        world = world_from_fit(
            self.fit,
            workers=self.workers,
            max_new_tokens=recipe.serve.max_new_tokens,
            seed=recipe.tune.seed,
            flush_s=recipe.engine.flush_s,
            slowdown=self.slowdown,
        )
        return replace(
            world,
            acceptance=recipe.serve.acceptance,
            router=router,
            limits=UNLIMITED if router is None else self.admission,
            fleet=self._fleet(),
            concurrency=workload.concurrency,
            closed_loop=workload.closed_loop,
            finished=workload.finished,
        )

    def _fleet(self) -> Fleet | None:
        """Return the replicas that come and go; None: their number is fixed. Raises InputError for
        a rule that does not exist, and where no start was measured.
        """
        chosen = self.settings.scaling
        spec = self.recipe.scale
        if chosen is None:
            return None
        if spec is None or not spec.start_s:
            raise InputError(
                f"recipe '{self.recipe.name}' does not say how long a replica takes to start",
                "give it as scale.start_s, in seconds as measured",
            )
        free = math.inf
        if spec.gpus_free is not None:
            free = spec.gpus_free // self.recipe.engine.tensor_parallel_size
        return Fleet(scaling_rule(chosen, spec), spec, free, self.recipe.tune.seed)
