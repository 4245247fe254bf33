"""The values that templates write into the files of a target, each computed one with its reason."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cached_property

import toolkit
from toolkit.backends import ServerCommand, StartsReplicas, backend_of
from toolkit.deploy import reckon
from toolkit.deploy.autoscaling import Autoscaling, of_queue, of_rule
from toolkit.deploy.order import KEY_FOLDER, Order, Sourced, check_image, shortened
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.server.options import model_name
from toolkit.units import GIB, MIB

# After the drain: last bytes (5 s), workers that end their step or are killed (10 s), and a margin.
AFTER_DRAIN_S = 20
# Host memory of a worker process before it loads a model: docs/how-to/deploy.md
WORKER_MIB = 1024
# Host memory of a server's processes besides its workers: vLLM 0.32 on CPUs took 613 MiB for its
# API server and 576 MiB for its scheduler.
SERVER_MIB = 1280
UNKNOWN_MODELS_GIB = 1024  # the models' cache, where a size is not known
IN_EVERY_IMAGE = "engines"  # an extra that the Dockerfile installs
MAX_USER = 31  # characters of a user's name
MIN_DRIFT_PERCENT = 15.0  # the times of a shared machine vary by about this much anyway
CHECK_S = 15  # that the check of a replica takes besides waiting for a token
MIN_AWAY_S = 900  # before one that is away alerts: others have its requests
# Preemptions of 100 requests that a plan without a prediction may have; else twice the predicted.
USUAL_PREEMPTED_PERCENT = 5.0

# The label `nvidia.com/gpu.product` has the product name of a node's GPUs, which NVIDIA's GPU
# feature discovery writes: the device's name with hyphens for spaces, as NVIDIA-H200 or
# NVIDIA-A100-SXM4-80GB. A GPU that is time-sliced between pods has the suffix "-SHARED"; one that
# is partitioned in one size "-MIG-3g.40gb" and the like: NVIDIA/k8s-device-plugin,
# docs/gpu-feature-discovery/README.md and internal/lm/resource.go (productLabel). Laws are about
# whole GPUs, so values with a suffix do not match.
PRODUCTS = (
    *("NVIDIA-A10", "NVIDIA-A10G", "NVIDIA-A30", "NVIDIA-A40"),
    *("NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-SXM4-40GB"),
    *("NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-SXM4-80GB"),
    *("NVIDIA-L4", "NVIDIA-L40", "NVIDIA-L40S"),
    *("NVIDIA-H100-PCIe", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-NVL"),
    *("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "NVIDIA-B200",
)


class Values:
    """What the templates of one target read.

    Templates also read the plan, the recipe and the options themselves. Properties that raise
    `InputError` say so.

    Args:
        order: the plan and the options.
        front: the engine is a server of its own, and llmctl's front stands before its replicas.
        cluster: it runs in Kubernetes, where Prometheus' operator decides the labels of series.

    Attributes:
        folder: of the files on the machine that runs the units.
        user: the one of the front and its replicas under systemd.
        drain: seconds for running requests to end, of a server and of the front before replicas.
        startup: seconds that a load may take.
        startup_checks: how often a probe asks, every 5 s, before a load has taken too long.
        away_s: seconds that one which is away may load before an alert.
        models_gib: GiB for the model's files; None where its size is not known.
    """

    notice_s = 5  # until a cluster's proxies know that /ready answers 503
    front_mib = 768  # host memory of `serve` itself
    # A pod's memory limit over its request: libraries and loading were not measured exactly.
    limit_factor = 2
    shared_gib = 1  # of /dev/shm, for NCCL between a worker's processes
    many = 3  # pods: of fewer, one that is away is half or more

    def __init__(self, order: Order, *, front: bool, cluster: bool) -> None:
        self.order = order
        self.options = order.options
        self.plan = order.plan
        self.recipe = order.plan.recipe
        self.front = front
        self.cluster = cluster
        self.name = order.name
        self.replica = f"{order.name}-replica"  # the name of the replicas' objects
        self.model = self.recipe.model.source
        self.served_model = model_name(order.plan)
        self.port = self.recipe.serve.port or 8000
        self.hang_s = math.ceil(self.recipe.serve.hang_s)
        self.alive_s = self.hang_s + CHECK_S
        self.key_file = f"{KEY_FOLDER}/{order.name}.key"
        # Where the model is a folder, a sandbox must show it.
        self.model_folder = self.model if self.model.startswith("/") else ""
        # Processes of one worker exchange tensors: NCCL needs more than 64 MB for it.
        self.shares_memory = self.recipe.engine.tensor_parallel_size > 1
        self.user = shortened(order.name, order.name, MAX_USER)
        prefix = self.options.prefix
        self.folder = f"{prefix}/{self.name}" if prefix else self.options.folder
        self.drain = reckon.drain_s(self.server)
        self.startup = reckon.startup_s(order)
        self.startup_checks = self.startup.value // 5
        self.away_s = max(self.startup.value, MIN_AWAY_S)
        self.models_gib = reckon.models_gib(order.plan)

    @cached_property
    def server(self) -> Order:
        """The order of one server: behind a front its plan has one worker, and no rule."""
        if not self.front:
            return self.order
        recipe = self.recipe.model_copy(update={"workers": 1})
        settings = self.plan.settings.model_copy(update={"scaling": None})
        update = {"workers": 1, "recipe": recipe, "settings": settings}
        plan = self.plan.model_copy(update=update)
        return replace(self.order, plan=plan)

    @cached_property
    def command(self) -> ServerCommand:
        """The command of a replica. Raises `InputError` if its engine has no such servers."""
        engine = self.recipe.engine.name
        backend = backend_of(engine)
        if not isinstance(backend, StartsReplicas):
            raise InputError(
                f"engine '{engine}' has no servers that could stand behind a front",
                "render it for 'local'",
            )
        return backend.described(self.plan, self.served_model)

    # How many, and with what.

    @cached_property
    def count(self) -> Sourced[int]:
        """The number of servers, each with the workers of the plan, or of replicas."""
        workers = self.server.plan.workers
        if self.options.replicas:
            return Sourced(self.options.replicas, "--replicas")
        own = "plan: workers" if self.front else "one server has all workers of the plan"
        source = f"{own}; for more: --replicas, or tune with --workers"
        return Sourced(self.plan.workers // workers, source)

    @cached_property
    def gpus(self) -> Sourced[int]:
        """GPUs of one server; 0 on CPUs."""
        if self.recipe.hardware.device == "cpu":
            return Sourced(0, "the recipe's hardware.device is cpu")
        size = self.recipe.engine.tensor_parallel_size
        workers = self.server.plan.recipe.workers
        return Sourced(
            workers * size, f"recipe: {size} for each worker; workers of a server: {workers}"
        )

    @cached_property
    def _threads(self) -> int:
        engine = self.recipe.engine
        return (engine.threads or 1) * engine.tensor_parallel_size

    @cached_property
    def cores(self) -> Sourced[int]:
        """CPU cores that a server requests."""
        workers = self.server.plan.recipe.workers
        own, why = (2, "its API server and its scheduler") if self.front else (1, "the front")
        source = f"recipe: {self._threads} threads for each worker, and {own} for {why}"
        return Sourced(workers * self._threads + own, source)

    @cached_property
    def _worker_mib(self) -> Sourced[int]:
        """Host memory of one worker, also on a GPU: the weights pass through it once."""
        weights = self.recipe.model.weight_bytes or 0
        on_cpu = self.recipe.hardware.device == "cpu"
        cache = self.plan.fit.engine.kv_budget_bytes if on_cpu else 0
        libraries = WORKER_MIB * self.recipe.engine.tensor_parallel_size  # a process for each share
        parts = [f"{libraries} MiB of libraries", f"{math.ceil(weights / MIB):,} MiB of weights"]
        parts += [f"{math.ceil(cache / MIB):,} MiB of KV cache"] if cache else []
        return Sourced(libraries + math.ceil((weights + cache) / MIB), " + ".join(parts))

    @cached_property
    def memory_mib(self) -> Sourced[int]:
        """Host memory that a server with all its workers requests."""
        own = SERVER_MIB if self.front else self.front_mib
        workers = self.server.plan.recipe.workers
        source = f"{own} MiB of its own, and for each worker {self._worker_mib.source}"
        return Sourced(own + workers * self._worker_mib.value, source)

    @cached_property
    def memory_limit_mib(self) -> Sourced[int]:
        """Host memory at which the pod of a server is killed.

        Workers of llmctl may use more than they request: swapped caches, shared memory, and the
        weights that all processes of a group load.
        """
        source = f"{self.limit_factor} times what it requests"
        limit = self.limit_factor * self.memory_mib.value
        if self.front:
            return Sourced(limit, source)
        group = self.recipe.engine.tensor_parallel_size
        swap = self.plan.fit.swap
        extra = (group - 1) * (self.recipe.model.weight_bytes or 0)
        extra += swap.host_bytes if swap else 0
        extra += self.shared_gib * GIB if group > 1 else 0
        each = math.ceil(extra / MIB)
        if each:
            what = "swapped caches, /dev/shm, and weights in all processes while they load"
            source += f", and {each:,} MiB for each worker: {what}"
        return Sourced(limit + self.plan.recipe.workers * each, source)

    @cached_property
    def devices(self) -> list[str]:
        """The GPUs of each replica, like '0,1', on a machine that has all of them; '' for none."""
        return self._shares(self.gpus.value)

    @cached_property
    def cpus(self) -> list[str]:
        """The CPUs of each replica there; '' on GPUs, and where the recipe sets no threads."""
        own = self.recipe.hardware.device == "cpu" and self.recipe.engine.threads is not None
        return self._shares(self._threads if own else 0)

    def _shares(self, size: int) -> list[str]:
        starts = [number * size for number in range(self.count.value)]
        return [",".join(map(str, range(start, start + size))) for start in starts]

    # How long.

    @cached_property
    def grace(self) -> Sourced[int]:
        """Seconds between SIGTERM and SIGKILL: notice, drain, and the end of the process."""
        notice_s = self.notice_s if self.cluster else 0
        parts = f"notice {notice_s} + " if notice_s else ""
        seconds = notice_s + self.drain.value + AFTER_DRAIN_S
        source = f"{parts}drain {self.drain.value} + {AFTER_DRAIN_S} for the last bytes"
        return Sourced(seconds, source)

    def replica_port(self, number: int) -> int:
        """Return the port of a replica on the machine of its front."""
        return self.port + 1 + number

    # Where.

    @cached_property
    def image(self) -> Sourced[str]:
        """The image of llmctl, with the recipe's engine unless that has an image of its own.

        Raises `InputError` if the image of the command line is not pinned.
        """
        if self.options.image:
            image = check_image(self.options.image)
            source = "--image"
            if "@sha256:" not in image:
                source += f"; NOT PINNED: a tag may be moved, {image}@sha256:... may not"
            return Sourced(image, source)
        extra = "" if self.front else traits_of(self.recipe.engine.name).extra
        wanted = extra if extra not in ("", IN_EVERY_IMAGE) else ""
        name = f"llmctl:{toolkit.__version__}" + (f"-{wanted}" if wanted else "")
        arguments = f" --build-arg 'EXTRAS=[{wanted}]'" if wanted else ""
        build = f"docker build -t {name}{arguments} ."
        source = f"this llmctl's version; build it in a checkout: {build}"
        return Sourced(name, source)

    @cached_property
    def replica_image(self) -> Sourced[str]:
        """The image of a replica. Raises `InputError` as `image` does."""
        if self.options.replica_image:
            return Sourced(check_image(self.options.replica_image), "--replica-image")
        image = self.command.image
        source = f"{self.command.image_source}; another one: --replica-image"
        return Sourced(image, source)

    @cached_property
    def products(self) -> Sourced[list[str]]:
        """The values of `nvidia.com/gpu.product` for nodes that suit the workers: of the GPU that
        was measured. For an analytic fit, they are all names with every word of the recipe's
        hardware.name ('A100-80GB' matches 'A100-SXM4-80GB' and 'A100-80GB-PCIe').
        """
        facts = self.plan.fit.engine
        if not facts.analytic:
            return Sourced([facts.device.replace(" ", "-")], "fit: the GPU that was measured")
        name = self.recipe.hardware.name
        found = [product for product in PRODUCTS if _words(name) <= _words(product)]
        if found:
            return Sourced(found, f"every GPU called {name}, as the fit is not measured")
        guessed = "-".join(["NVIDIA", *name.removeprefix("NVIDIA").replace("-", " ").split()])
        check = "compare `kubectl get nodes -L nvidia.com/gpu.product`, and change it here"
        return Sourced([guessed], f"guessed from hardware.name; {check}")

    @property
    def models_bound(self) -> Sourced[int]:
        """GiB that a pod without a claim may use for the model."""
        why = "a bound: no size is known (model.weight_bytes)"
        return self.models_gib or Sourced(UNKNOWN_MODELS_GIB, why)

    @property
    def claimed(self) -> bool:
        """Whether each replica claims a volume: the model is the hub's, and its size is known."""
        named = self.options.model_claim
        return bool(self.front and not named and self.recipe.model.from_hub and self.models_gib)

    def caches(self, folder: str) -> dict[str, str]:
        """Return where compiled kernels are kept below `folder`, which outlives the process:
        variables of vLLM, Triton and torch.compile. Else each start compiles again, for minutes.
        """
        return {
            "VLLM_CACHE_ROOT": f"{folder}/cache/vllm",
            "TRITON_CACHE_DIR": f"{folder}/cache/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache/inductor",
        }

    # Monitoring and scaling.

    def job(self, name: str) -> str:
        """Return the `job` label of the series of the pods or units called `name`.

        Prometheus puts `job` on every series that it scrapes. Prometheus' operator sets it to
        NAMESPACE/NAME of the PodMonitor: API reference of monitoring.coreos.com/v1,
        PodMonitorSpec.jobLabel. Elsewhere it is the job_name of the scrape configuration.
        """
        return f"{self.options.namespace}/{name}" if self.cluster else name

    def matchers(self, name: str) -> str:
        """Return the label matchers of the series of the pods or units called `name`."""
        own = f'job="{self.job(name)}"'
        return f'namespace="{self.options.namespace}",{own}' if self.cluster else own

    @cached_property
    def drift_percent(self) -> Sourced[float]:
        """The allowed mean deviation of batch times from predictions."""
        fit = self.plan.fit
        overhead = fit.rounds.overhead if fit.rounds else fit.overhead
        off = [fit.off_percent(law) for law in (fit.prefill, fit.decode)]
        stated = max(*off, overhead.error.median_percent)
        source = f"twice the largest median error of the fit's laws, {stated:.1f} %"
        if 2 * stated < MIN_DRIFT_PERCENT:
            return Sourced(MIN_DRIFT_PERCENT, f"{source}, but at least {MIN_DRIFT_PERCENT:g} %")
        return Sourced(round(2 * stated, 1), source)

    @property
    def preempted_percent(self) -> Sourced[float]:
        """Preemptions of 100 requests that are still usual."""
        predicted = self.plan.outcome.metrics.get("evicted_percent", 0.0)
        most = max(2 * predicted, USUAL_PREEMPTED_PERCENT)
        return Sourced(
            most, f"twice the predicted {predicted:.3g}, at least {USUAL_PREEMPTED_PERCENT:g}"
        )

    @cached_property
    def threshold(self) -> Sourced[int | None]:
        """Requests that may wait for one server; None: no queue tells."""
        return reckon.waiting_threshold(self.server.plan, self.order.trace)

    @cached_property
    def scaling(self) -> Autoscaling:
        """When pods are added and taken away. Raises `InputError` as `of_rule` does."""
        if self.plan.settings.scaling is not None:
            return of_rule(self.plan, self.count, front=self.front)
        load_s = self.plan.fit.engine.load_s
        return of_queue(self.count, load_s, self.threshold, self.grace.value)

    @cached_property
    def surge(self) -> Sourced[int]:
        """How many pods a rollout of a Deployment adds: it never takes half of the pods away.

        One is added before one goes. On GPUs, where a free one is rare, from `many` pods on they
        are replaced one at a time.
        """
        pods = self.count.value
        devices = self.gpus.value
        if devices and pods >= self.many and not self.front:
            away = f"one of {pods} pods is away at a time, as for the PodDisruptionBudget"
            return Sourced(0, f"{away}: no further GPU is needed")
        source = "a new pod is ready before an old one goes"
        if devices and not self.front:
            waits = "without them the rollout waits, and the old pods serve"
            source += f"; it needs {devices} free GPUs: {waits}"
        return Sourced(1, source)

    @property
    def mounting(self) -> int:
        """The greatest number of pods that mount the models at once."""
        return self.scaling.most.value + (0 if self.front else self.surge.value)

    @property
    def prometheus_namespace(self) -> str:
        """Prometheus' namespace, from its address in the cluster's DNS; '' for other addresses."""
        host = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", self.options.prometheus)
        return host[1] if host else ""


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
