"""The input of a target: a plan with the options of the command line, and names made from it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from toolkit.deploy.plan import LIMITS
from toolkit.errors import InputError
from toolkit.files.bench import BenchReport
from toolkit.files.plan import Plan
from toolkit.files.recipe import NAME_PATTERN
from toolkit.files.tuning import breaks, broken
from toolkit.traces.types import Trace

T = TypeVar("T")
KEY_FOLDER = "/etc/llmctl"  # of the file with the API key, on a machine that runs the server
DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
# Of 63 characters: the rest is for what a ReplicaSet, a pod and a ConfigMap's hash append.
MAX_OBJECT_NAME = 40


def object_name(recipe: str) -> str:
    """Return a name for a Service (RFC 1035), made from a recipe's name and unique to it."""
    plain = re.sub(r"[^a-z0-9]+", "-", recipe).strip("-")
    name = f"llmctl-{plain}"
    if plain == recipe and len(name) <= MAX_OBJECT_NAME:
        return name
    return shortened(name, recipe, MAX_OBJECT_NAME, always=True)


def shortened(name: str, unique: str, most: int, *, always: bool = False) -> str:
    """Return `name` in at most `most` characters, with a digest of `unique` where it is cut."""
    if len(name) <= most and not always:
        return name
    tail = hashlib.sha256(unique.encode()).hexdigest()[:6]
    return f"{name[: most - 7].rstrip('-')}-{tail}"


def check_image(image: str) -> str:
    """Return a pinned `image`. Raises `InputError` for a wrong name or a tag that may move."""
    found = IMAGE.fullmatch(image)
    if found is None:
        example = "for example registry.example.com/llmctl:0.1.0"
        raise InputError(f"{image!r} is not the name of an image", example)
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise InputError(
            f"image {image} is not pinned", "add a version as its tag, or a digest; never 'latest'"
        )
    return image


def digest(content: bytes) -> str:
    """Return the sha256, in hex."""
    return hashlib.sha256(content).hexdigest()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a rendered file, one or two plain names below `folder`.

    A template of units has an `@` before its type. Raises `InputError` for other names, and where a
    link leads out of `folder`.
    """
    parts = name.lower().replace("@.service", ".service").split("/")
    if len(parts) > 2 or not all(re.fullmatch(NAME_PATTERN, part) for part in parts):
        raise InputError(
            f"{name!r} is not the name of a rendered file", f"names match {NAME_PATTERN}"
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{name}: a link leads out of {folder}", "remove the link, or choose another folder"
        )
    return path


@dataclass(slots=True, frozen=True)
class Sourced(Generic[T]):
    """A value in a rendered file, and where it comes from."""

    value: T
    source: str

    def __str__(self) -> str:
        return str(self.value)


@dataclass(slots=True, frozen=True)
class Options:
    """Options of the command line. Values that no cluster takes raise `InputError`.

    Args:
        image: '': the target's pinned default.
        replicas: 0: as many as the tuning found, or 1.
        prometheus: the URL that KEDA queries.
        model_claim: a volume claim with the cache of models.
        folder: the absolute path of the rendered files, for units that name them.
        prefix: the absolute path of the folder below which the files of each deployment have one
            of its name, on the machine that runs the units; '': they stay in `folder`.
        replica_image: of an engine's own server; '': the engine's pinned default.
        fronts: front pods before replicas of an engine's own servers.
        gateway: namespace and name of the Gateway through which clients outside reach the server.
        templates: a folder with changed templates.
    """

    image: str = ""
    namespace: str = "default"
    replicas: int = 0
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    model_claim: str = ""
    folder: str = ""
    prefix: str = ""
    fronts: int = 1
    gateway: str = ""
    templates: Path | None = None
    replica_image: str = ""

    def __post_init__(self) -> None:
        name = "not a name that Kubernetes takes"
        label = name, f"names match {DNS_LABEL}"
        gateway = (
            "not a Gateway's namespace and name",
            f"like edge/public; each matches {DNS_LABEL}",
        )
        path = "not a plain absolute path", "like /etc/llmctl; letters, digits, '.', '_' and '-'"
        url = "not a plain URL", "like http://prometheus.monitoring.svc:9090"
        # Each value, its pattern, what else it is, and a hint. A value may be left out.
        checks = [
            ("--namespace", self.namespace, DNS_LABEL, label),
            ("--gateway", self.gateway, rf"({DNS_LABEL}/{DNS_LABEL})?", gateway),
            ("--model-claim", self.model_claim, rf"({DNS_LABEL})?", label),
            ("--prefix", self.prefix, r"(/[A-Za-z0-9._-]+)*", path),
            ("--prometheus", self.prometheus, r"https?://[A-Za-z0-9._:/-]+", url),
        ]
        for option, value, pattern, (problem, hint) in checks:
            if not re.fullmatch(pattern, value):
                raise InputError(f"{option} {value!r}: {problem}", hint)


@dataclass(slots=True, frozen=True)
class Order:
    """A plan with everything that a target may need.

    `text` is the plan's file. `bench` has the errors of the fit's
    predictions, if they were measured. `trace` is the traffic for the autoscaling threshold.
    """

    plan: Plan
    text: str
    options: Options = field(default_factory=Options)
    bench: BenchReport | None = None
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """The name of objects and units."""
        return object_name(self.plan.recipe.name)

    def stamp(self) -> dict[str, str]:
        """Return the origin that every rendered file records: role to sha256."""
        digests = {}
        for role in ("profile", "fit", "tuning", "scaling"):
            if role in self.plan.inputs:
                digests[role] = self.plan.inputs[role].sha256
                if not re.fullmatch(r"[0-9a-f]{64}", digests[role]):
                    raise InputError(
                        f"plan.json: inputs.{role}.sha256 is not a sha256",
                        f"make it with: {Plan.remake}",
                    )
        return digests | {"plan": digest(self.text.encode())}

    def comment(self) -> str:
        """Return the head of a file: its origin, and whether its limits are kept, as predicted."""
        plan = self.plan
        lines = ["Rendered by llmctl. The comment at a value says where the value comes from."]
        lines += [f"{role}.json sha256 {digest}" for role, digest in self.stamp().items()]
        if plan.fit.engine.analytic:
            lines.append(f"Nothing was measured: {plan.fit.engine.analytic}.")
        if broken(plan.limits):
            lines.append(f"Warning: the plan is predicted to {breaks(plan.limits)}.")
        elif any(limit.kept is None for limit in plan.limits):
            why = plan.explained[LIMITS].source if LIMITS in plan.explained else "untuned"
            lines.append(f"Limits are not predicted: {why}.")
        else:
            lines.append("All limits are predicted to be kept.")
        if (changed := plan.explained.get("requests")) is not None:
            lines.append(f"Predicted for other requests, {changed.value}: {changed.source}.")
        return "\n".join(lines)
