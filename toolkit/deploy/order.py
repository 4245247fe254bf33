"""What a target is rendered from, and what comes of it: files as text, and where each of their values comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from toolkit.deploy.names import object_name
from toolkit.errors import InputError
from toolkit.files.labels import VALUE_PATTERN
from toolkit.files.limits import broken
from toolkit.files.plan import Plan
from toolkit.files.validation import Validation
from toolkit.traces.types import Trace

T = TypeVar("T")
ALLOW_BROKEN = "--allow-broken-limits"
DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(slots=True, frozen=True)
class Reckoned(Generic[T]):
    """A value that files carry, and where it comes from."""

    value: T
    source: str


@dataclass(slots=True, frozen=True)
class Told:
    """A line of EXPLAIN.md: a key as it stands in a file, its value, and where that comes from."""

    key: str
    value: str
    source: str


def told(key: str, reckoned: Reckoned[T], shown: str | None = None) -> Told:
    """The line of a reckoned value."""
    return Told(key, str(reckoned.value) if shown is None else shown, reckoned.source)


@dataclass(slots=True, frozen=True)
class Options:
    """What the command line says, and no file knows.

    `gpu_products` are the values of `nvidia.com/gpu.product` that nodes must have one of; none: those of the fit or
    the recipe are preferred. `image` '' takes the target's pinned default; `replicas` 0 takes what the tuning found,
    or 1, and `max_replicas` 0 twice as many; `prometheus` is where KEDA asks; `model_claim` names a volume claim with
    the models' cache; `program` is the path of llmctl in a unit; `folder` is where the files will lie, absolute, for
    units that name them. `InputError` for what no cluster takes.
    """

    image: str = ""
    namespace: str = "default"
    replicas: int = 0
    max_replicas: int = 0
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    model_claim: str = ""
    program: str = "/opt/llmctl/bin/llmctl"
    folder: str = ""
    gpu_products: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, text in (("--namespace", self.namespace), ("--model-claim", self.model_claim or "none")):
            if not re.fullmatch(DNS_LABEL, text):
                raise InputError(f"{option} {text!r}: not a name that Kubernetes takes", f"names match {DNS_LABEL}")
        for product in self.gpu_products:
            if not re.fullmatch(VALUE_PATTERN, product):
                raise InputError(
                    f"--gpu-product {product!r}: not the value of a label", "like NVIDIA-H200; no spaces, 63 characters"
                )
        if not re.fullmatch(r"https?://[A-Za-z0-9._:/-]+", self.prometheus):
            raise InputError(
                f"--prometheus {self.prometheus!r}: not a plain URL", "like http://prometheus.monitoring.svc:9090"
            )


@dataclass(slots=True, frozen=True)
class Order:
    """A plan and all that a target may ask for.

    `text` is the plan's file as it is written, `digest` its sha256; `validation` tells how wrong predictions of the
    plan's fit were, where somebody looked; `trace` is the traffic that the autoscaling threshold is reckoned for.
    """

    plan: Plan
    text: str
    digest: str
    options: Options = field(default_factory=Options)
    validation: Validation | None = None
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """What objects and units are called."""
        return object_name(self.plan.recipe.name)

    @property
    def allowances(self) -> list[str]:
        """Options of `llmctl serve` without which it would refuse the plan, rendered although it breaks limits."""
        return [ALLOW_BROKEN] if broken(self.plan.limits) else []

    def stamp(self) -> dict[str, str]:
        """What every rendered file says of its origin: role to sha256."""
        known = {role: one.sha256 for role, one in self.plan.inputs.items() if role in ("profile", "fit", "tuning")}
        for role, digest in known.items():
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise InputError(f"plan.json: inputs.{role}.sha256 is no sha256", f"make it with: {Plan.remake}")
        return known | {"plan": self.digest}

    def comment(self) -> str:
        """The stamp as lines for a file's head."""
        lines = [f"{role}.json sha256 {digest}" for role, digest in self.stamp().items()]
        return "\n".join(["Rendered by llmctl; EXPLAIN.md says where each value comes from.", *lines])


@dataclass(slots=True, frozen=True)
class Rendered:
    """A target's files by their names below the folder, what explains them, and how to start them.

    `url` is where the server then is, where that is not what the recipe says.
    """

    files: dict[str, str]
    told: list[Told]
    start: str
    url: str = ""
