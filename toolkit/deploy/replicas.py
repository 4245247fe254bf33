"""Replicas of an engine that is a server of its own, and llmctl's front before them.

`KindReplicas` is what the targets share of one kind of them: how many servers, the command of each,
its devices and memory, how long it loads and drains, when one more is needed. `Replication` is all
kinds, one or those of a fleet, and the front. A target only writes them down in its own form. Every
value has its source.

A replica has no key: only the front and Prometheus reach it. Clients' keys are the front's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from toolkit.backends import DescribesServer, ServerCommand, backend_of
from toolkit.deploy import reckon
from toolkit.deploy.order import (
    SECONDS,
    ExplainedValue,
    Order,
    Sourced,
    check_image,
    explain_value,
    llmctl_image,
    object_name,
)
from toolkit.deploy.targets.engine_flags import check_servable_elsewhere
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.routing.routers import RoundRobinRouter
from toolkit.serve.assemble import model_name

# Host memory of a server's processes besides its workers: vLLM 0.32 on CPUs took 613 MiB for its
# API server and 576 MiB for its scheduler.
SERVER_MIB = 1280
ALIVE = "alive.py"  # the file of the program that finds out whether a replica hangs
MAX_KIND_NAME = 50  # of 63 characters: the rest is for what a StatefulSet appends
CHECK_S = 15  # that it takes besides waiting for a token


@dataclass(frozen=True)
class KindReplicas:
    """The replicas of one kind: all of an order's plan, or of its fleet kind `number`."""

    order: Order
    number: int = 0

    @property
    def kind(self) -> Kind:
        """The kind, with its recipe and fit."""
        return self.order.plan.kinds[self.number]

    @cached_property
    def own(self) -> Order:
        """The order of this kind alone, with the targets of all. Its name is not the order's."""
        whole = self.order.plan
        if not whole.others:
            return self.order
        plan = whole.alone(self.number)
        common = {"sla": whole.recipe.sla, "tune": whole.recipe.tune}
        changes = {"recipe": plan.recipe.model_copy(update=common), "predicted": whole.predicted}
        return replace(self.order, plan=plan.model_copy(update=changes))

    @cached_property
    def alone(self) -> Order:
        """The order of one replica: its plan has one worker."""
        plan = self.own.plan
        recipe = plan.recipe.model_copy(update={"workers": 1})
        return replace(self.own, plan=plan.model_copy(update={"workers": 1, "recipe": recipe}))

    @property
    def label(self) -> str:
        """The beginning of the names of its services and files."""
        if not self.order.plan.others:
            return "replica"
        return object_name(self.kind.recipe.name).removeprefix("llmctl-")

    @property
    def name(self) -> str:
        """The name of its objects, unique to the order's name and the kind's."""
        name = self.order.name
        room = MAX_KIND_NAME - len(self.label) - 1
        if len(name) > room and self.order.plan.others:
            tail = hashlib.sha256(name.encode()).hexdigest()[:6]
            name = f"{name[: room - 7].rstrip('-')}-{tail}"
        return f"{name}-{self.label}"

    def file(self, stem: str, suffix: str, several: str = "") -> str:
        """The name of a file about this kind: in a fleet it has the label, else `several`."""
        label = self.label if self.order.plan.others else several
        return f"{stem}-{label}{suffix}" if label else f"{stem}{suffix}"

    def at(self, where: str) -> str:
        """An address of its replicas as the front takes it: with the kind's name in a fleet."""
        return f"{self.kind.recipe.name}={where}" if self.order.plan.others else where

    def about(self, lines: Sequence[ExplainedValue]) -> list[ExplainedValue]:
        """Lines of EXPLAIN.md, which name the kind in a fleet."""
        if not self.order.plan.others:
            return list(lines)
        name = self.kind.recipe.name
        return [replace(line, key=f"{name}: {line.key}") for line in lines]

    @cached_property
    def server(self) -> ServerCommand:
        """The command of a replica."""
        engine = self.kind.recipe.engine.name
        backend = backend_of(engine)
        if not isinstance(backend, DescribesServer):
            raise InputError(
                f"engine '{engine}' has no servers that could stand behind a front",
                "render it for 'local'",
            )
        return backend.described(self.own.plan, model_name(self.order.plan))

    def arguments(self, host: str, port: int) -> list[str]:
        """The words after the program: the model's flags, the address and the drain."""
        words = [word for flag, _ in self.server.flags for word in flag]
        words += ["--host", host, "--port", str(port)]
        return [*words, self.server.drain, str(self.drain.value)]

    @property
    def environment(self) -> dict[str, str]:
        """A replica's environment in a container, besides the folders of HOME and HF_HOME.

        Libraries look up the user's name, which an unprivileged container does not have otherwise.
        """
        return dict(self.server.environment) | {"USER": "llmctl"}

    @cached_property
    def count(self) -> Sourced[int]:
        """The number of replicas."""
        options = self.order.options
        plan = self.order.plan
        if plan.others:
            source = "fleet: workers of this kind"
            if plan.workers_needed is not None:
                source = "tuned: these counts keep all limits"
            return Sourced(self.kind.workers, source)
        if options.replicas:
            return Sourced(options.replicas, "--replicas")
        if plan.workers_needed is not None:
            return Sourced(plan.workers_needed, "tuned: the fewest that keep all limits")
        return Sourced(plan.workers, "plan: workers; for more: --replicas, or tune with --workers")

    @property
    def _before(self) -> list[KindReplicas]:
        """The kinds before it, which have the first devices of a machine that has those of all."""
        return [KindReplicas(self.order, number) for number in range(self.number)]

    @cached_property
    def gpus(self) -> Sourced[int]:
        """GPUs of one replica; 0 on CPUs."""
        gpus = reckon.gpus(self.alone.plan.recipe)
        if not gpus.value:
            return gpus
        return Sourced(gpus.value, "recipe: engine.tensor_parallel_size, for each replica")

    @cached_property
    def devices(self) -> list[str]:
        """The GPUs of each replica, like '0,1', on a machine that has those of all, from 0."""
        first = sum(one.count.value * one.gpus.value for one in self._before)
        return _shares(first, self.count.value, self.gpus.value)

    @cached_property
    def cpus(self) -> list[str]:
        """The CPUs of each replica on such a machine; '' where the recipe sets no threads."""
        first = sum(one.count.value * one._threads for one in self._before)
        return _shares(first, self.count.value, self._threads)

    @property
    def _threads(self) -> int:
        """The CPUs of one replica; 0 on GPUs, and where the recipe does not set its threads."""
        recipe = self.kind.recipe
        if recipe.hardware.device != "cpu" or recipe.engine.threads is None:
            return 0
        return recipe.engine.threads * recipe.engine.tensor_parallel_size

    @cached_property
    def cores(self) -> Sourced[int]:
        """CPU cores that a replica requests."""
        engine = self.kind.recipe.engine
        threads = (engine.threads or 1) * engine.tensor_parallel_size
        return Sourced(2 + threads, f"its API server, its scheduler, and {threads} for its workers")

    @cached_property
    def memory_mib(self) -> Sourced[int]:
        """Host memory of a replica in MiB: also on GPUs the weights pass through it once."""
        worker = reckon.worker_memory_mib(self.alone.plan.kinds[0])
        source = f"{SERVER_MIB} MiB for its processes, and for its worker {worker.source}"
        return Sourced(SERVER_MIB + worker.value, source)

    @cached_property
    def drain(self) -> Sourced[int]:
        """Seconds for a replica's running requests to end."""
        return reckon.drain_s(self.alone)

    @cached_property
    def startup(self) -> Sourced[int]:
        """Seconds that a replica's load may take."""
        return reckon.startup_s(self.own)

    @property
    def hang_s(self) -> int:
        """Seconds for which a replica must be silent, and then give no token, to be restarted."""
        return math.ceil(self.order.plan.recipe.serve.hang_s)

    def asking(self, folder: str, port: int, *mode: str) -> list[str]:
        """The command that finds out whether a replica hangs, with its program in `folder`."""
        url = f"http://127.0.0.1:{port}"
        model = model_name(self.order.plan)
        note = "/tmp/llmctl-alive"  # a volume of the container's own
        return ["python3", f"{folder}/{ALIVE}", url, model, str(self.hang_s), note, *mode]

    @cached_property
    def threshold(self) -> Sourced[int | None]:
        """Requests that may wait for one replica."""
        return reckon.waiting_threshold(self.alone.plan, self.order.trace)

    @cached_property
    def image(self) -> Sourced[str]:
        """The image of a replica. `InputError` where the command line's is not pinned."""
        if self.order.options.replica_image:
            return Sourced(check_image(self.order.options.replica_image), "--replica-image")
        source = f"{self.server.image_source}; another one: --replica-image"
        return Sourced(self.server.image, source)

    def explained_first(self) -> list[ExplainedValue]:
        """The first lines of EXPLAIN.md that all targets have."""
        return [
            explain_value("replicas", self.count),
            explain_value("GPUs of a replica", self.gpus),
            explain_value("replica: drain", self.drain, SECONDS),
            explain_value("replica: load", self.startup, SECONDS),
        ]

    def explained_flags(self) -> list[ExplainedValue]:
        """The lines about a replica's own flags, where its command is written out."""
        lines = []
        for flag, source in self.server.flags:
            name = flag[0] if flag[0].startswith("-") else "flags"
            values = flag[1:] if flag[0].startswith("-") else flag
            lines.append(ExplainedValue(f"replica {name}", " ".join(values) or "given", source))
        return [*lines, explain_value("replica: image", self.image)]


@dataclass(frozen=True)
class Replication:
    """The replicas of an order's plan, kind by kind, and the front before them.

    Raises `InputError` where an option is about one kind and the plan has several. A kind's
    `server` raises it where its engine has no such servers.
    """

    order: Order

    def __post_init__(self) -> None:
        plan = self.order.plan
        options = self.order.options
        if not plan.others:
            return
        if options.replicas:
            raise InputError(
                f"--replicas {options.replicas}: a fleet sets the number of servers of each kind",
                "set workers of the kind in fleet.yaml, and render it again",
            )
        if options.gpu_products:
            raise InputError(
                "--gpu-product names the GPU of one kind of servers; the fleet has several",
                "name the nodes of each kind in the fleet: nodes",
            )
        devices = sorted({kind.kind.recipe.hardware.device for kind in self.kinds})
        if options.replica_image and len(devices) > 1:
            raise InputError(
                f"--replica-image {options.replica_image}: one image for all kinds, and they run "
                f"on {' and '.join(devices)}",
                "leave it out: each kind has the image of its device",
            )
        for kind in self.kinds:
            if kind.server.plan_variable:
                raise InputError(
                    f"kind '{kind.kind.recipe.name}': policy '{plan.policy.name}' runs inside the "
                    "engine, and the servers of a fleet run the engine's own",
                    "render it with --policy vllm",
                )

    @cached_property
    def kinds(self) -> list[KindReplicas]:
        """All kinds, in the plan's order."""
        return [KindReplicas(self.order, number) for number in range(len(self.order.plan.kinds))]

    @property
    def named(self) -> list[tuple[KindReplicas, int, str]]:
        """Each replica: its kind, its number in it, and its name in one file with all others."""
        return [
            (kind, number, f"{kind.label}-{number}")
            for kind in self.kinds
            for number in range(kind.count.value)
        ]

    def check_containable(self) -> None:
        """Raise `InputError` where a container of the engine cannot load the model."""
        for kind in self.kinds:
            check_servable_elsewhere(kind.kind.recipe, kind.kind.recipe.engine.name)

    @property
    def alive(self) -> str:
        """The program that finds out whether a replica hangs."""
        return self.kinds[0].server.alive

    @cached_property
    def front_image(self) -> Sourced[str]:
        """The image of the front, which loads the model's tokenizer and no engine."""
        return llmctl_image(self.order, engine=False)

    @cached_property
    def drain(self) -> Sourced[int]:
        """Seconds that the front's running requests get: as many as a replica's."""
        return max((kind.drain for kind in self.kinds), key=lambda drain: drain.value)

    @cached_property
    def startup(self) -> Sourced[int]:
        """Seconds that the load of all replicas may take."""
        return max((kind.startup for kind in self.kinds), key=lambda startup: startup.value)

    @property
    def router(self) -> Sourced[str]:
        """The router that the front takes from the plan, with its parameters."""
        planned = self.order.plan.replica_router
        if planned is None:
            return Sourced(RoundRobinRouter.name, "the default; the plan names none")
        given = ", ".join(f"{name}={value}" for name, value in planned.parameters.items())
        source = "plan: replica_router, which the front reads from plan.json"
        return Sourced(f"{planned.name} {given}".rstrip(), source)

    def front(self, plan: str, where: Sequence[str], host: str, port: int, *more: str) -> list[str]:
        """The words after `llmctl` that start the front; `where` is by `each`."""
        words = ["serve", plan, *where, "--host", host, "--port", str(port), *more]
        return [*words, "--shutdown-timeout", str(self.drain.value), *self.order.allowances]

    def of_kinds(
        self, lines: Callable[[KindReplicas], Sequence[ExplainedValue]]
    ) -> list[ExplainedValue]:
        """The lines of EXPLAIN.md about each kind, which name it in a fleet."""
        return [line for kind in self.kinds for line in kind.about(lines(kind))]

    def explained(self) -> list[ExplainedValue]:
        """The lines of EXPLAIN.md that all targets have."""
        longest = "as a replica's" if len(self.kinds) == 1 else "the longest of the kinds'"
        first = f"{longest}; it ends first, so its requests still have their replicas"
        keys = "replicas ask for no key: only the front and Prometheus reach them"
        return [
            *self.of_kinds(KindReplicas.explained_first),
            ExplainedValue("front: drain", f"{self.drain.value} s", first),
            explain_value("front: router", self.router),
            ExplainedValue("keys", "the front's", keys),
            *self.of_kinds(
                lambda kind: [explain_value("alert LlmctlReplicaQueue", kind.threshold)]
            ),
        ]

    def explained_on_ray(self) -> list[ExplainedValue]:
        """The lines of targets with a front that starts the replicas on a Ray cluster."""
        key = (
            "of the front's run: only it and Ray's machines know it; /health and /metrics are open"
        )
        scraped = "the front's page for Prometheus' job of the replicas: their ports change"
        return [
            *self.of_kinds(KindReplicas.explained_first),
            explain_value("front: router", self.router),
            ExplainedValue("replicas: key", "random", key),
            ExplainedValue("replicas: metrics", "/replicas/metrics", scraped),
        ]


def _shares(first: int, count: int, size: int) -> list[str]:
    """The numbers from `first` on in `count` shares of `size`, each as '0,1'; '' for none."""
    starts = [first + number * size for number in range(count)]
    return [",".join(map(str, range(start, start + size))) for start in starts]


def each(option: str, values: Sequence[str]) -> list[str]:
    """The option once for each value: `--replica URL` names one, `--replicas k8s://...` where the
    front finds them.
    """
    return [word for value in values for word in (option, value)]
