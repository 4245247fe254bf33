"""What a target is rendered from, and what comes of it: files as text, and where each of their
values comes from.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import jinja2

import toolkit
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.bench import Validation
from toolkit.files.plan import Kind, Plan
from toolkit.files.recipe import NAME_PATTERN, VALUE_PATTERN
from toolkit.files.shipped import shipped_templates
from toolkit.files.tuning import broken
from toolkit.traces.types import Trace

# Names that files, clusters and units take: refused where they could leave their folder or mean
# something else.

IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
OBJECT_LENGTH = 40  # of 63: what a ReplicaSet, a pod and a ConfigMap's hash append must fit, too


def object_name(recipe: str) -> str:
    """A name that a Service takes (RFC 1035), of a recipe's name; different recipes have different
    ones.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", recipe).strip("-")
    name = f"llmctl-{plain}"
    if plain == recipe and len(name) <= OBJECT_LENGTH:
        return name
    tail = hashlib.sha256(recipe.encode()).hexdigest()[:6]
    return f"{name[: OBJECT_LENGTH - 7].rstrip('-')}-{tail}"


def check_image(image: str) -> str:
    """`image`, if it is pinned. `InputError` for what is no image's name, and for a tag that moves."""
    found = IMAGE.fullmatch(image)
    if found is None:
        raise InputError(
            f"{image!r} is not the name of an image",
            "for example registry.example.com/llmctl:0.1.0",
        )
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise InputError(
            f"image {image} is not pinned", "add a version as its tag, or a digest; never 'latest'"
        )
    return image


def inside(folder: Path, name: str) -> Path:
    """The path of a rendered file: one or two plain names below `folder`. `InputError` for anything
    else.
    """
    parts = name.split("/")
    if len(parts) > 2 or not all(re.fullmatch(NAME_PATTERN, part.lower()) for part in parts):
        raise InputError(
            f"{name!r} is not the name of a rendered file", f"names match {NAME_PATTERN}"
        )
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{name}: a link leads out of {folder}", "remove the link, or choose another folder"
        )
    return path


T = TypeVar("T")
ALLOW_BROKEN = "--allow-broken-limits"
DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"


@dataclass(slots=True, frozen=True)
class Reckoned(Generic[T]):
    """A value that files carry, and where it comes from."""

    value: T
    source: str


@dataclass(slots=True, frozen=True)
class ExplainedValue:
    """A line of EXPLAIN.md: a key as it stands in a file, its value, and where that comes from."""

    key: str
    value: str
    source: str


def told(key: str, reckoned: Reckoned[T], shown: str | None = None) -> ExplainedValue:
    """The line of a reckoned value."""
    return ExplainedValue(key, str(reckoned.value) if shown is None else shown, reckoned.source)


@dataclass(slots=True, frozen=True)
class Options:
    """What the command line says, and no file knows.

    `gpu_products` are the values of `nvidia.com/gpu.product` that nodes must have one of; none:
    those of the fit or the recipe are preferred. `image` '' takes the target's pinned default;
    `replicas` 0 takes what the tuning found, or 1, and `max_replicas` 0 twice as many; `prometheus`
    is where KEDA asks; `model_claim` names a volume claim with the models' cache; `program` is the
    path of llmctl in a unit; `folder` is where the files will lie, absolute, for units that name
    them. `InputError` for what no cluster takes.
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
        for option, text in (
            ("--namespace", self.namespace),
            ("--model-claim", self.model_claim or "none"),
        ):
            if not re.fullmatch(DNS_LABEL, text):
                raise InputError(
                    f"{option} {text!r}: not a name that Kubernetes takes",
                    f"names match {DNS_LABEL}",
                )
        for product in self.gpu_products:
            if not re.fullmatch(VALUE_PATTERN, product):
                raise InputError(
                    f"--gpu-product {product!r}: not the value of a label",
                    "like NVIDIA-H200; no spaces, 63 characters",
                )
        if not re.fullmatch(r"https?://[A-Za-z0-9._:/-]+", self.prometheus):
            raise InputError(
                f"--prometheus {self.prometheus!r}: not a plain URL",
                "like http://prometheus.monitoring.svc:9090",
            )


@dataclass(slots=True, frozen=True)
class Order:
    """A plan and all that a target may ask for.

    `text` is the plan's file as it is written, `digest` its sha256; `validation` tells how wrong
    predictions of the plan's fit were, where somebody looked; `trace` is the traffic that the
    autoscaling threshold is reckoned for.
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
        """Options of `llmctl serve` without which it would refuse the plan, rendered although it
        breaks limits.
        """
        return [ALLOW_BROKEN] if broken(self.plan.limits) else []

    def stamp(self) -> dict[str, str]:
        """What every rendered file says of its origin: role to sha256."""
        known = {
            role: one.sha256
            for role, one in self.plan.inputs.items()
            if role in ("profile", "fit", "tuning")
        }
        for role, digest in known.items():
            if not re.fullmatch(r"[0-9a-f]{64}", digest):
                raise InputError(
                    f"plan.json: inputs.{role}.sha256 is no sha256", f"make it with: {Plan.remake}"
                )
        return known | {"plan": self.digest}

    def comment(self) -> str:
        """The stamp as lines for a file's head."""
        lines = [f"{role}.json sha256 {digest}" for role, digest in self.stamp().items()]
        return "\n".join(
            ["Rendered by llmctl; EXPLAIN.md says where each value comes from.", *lines]
        )


@dataclass(slots=True, frozen=True)
class Rendered:
    """A target's files by their names below the folder, what explains them, and how to start them.

    `url` is where the server then is, where that is not what the recipe says.
    """

    files: dict[str, str]
    told: list[ExplainedValue]
    start: str
    url: str = ""


# Container images: pinned, and said which. None moves under a running deployment.


def llmctl_image(order: Order, *extras: str) -> Reckoned[str]:
    """The image with llmctl in it, with what the recipe's engine needs, and what `extras` of the
    package install.

    `InputError` where the one that was asked for is not pinned.
    """
    if order.options.image:
        image = check_image(order.options.image)
        moves = (
            ""
            if "@sha256:" in image
            else f"; NOT PINNED: a tag may be moved, {image}@sha256:... may not"
        )
        return Reckoned(image, f"--image{moves}")
    needed = {traits_of(kind.recipe.engine.name).extra for kind in order.plan.kinds}
    wanted = sorted({*extras, *needed} - {""})
    name = "-".join([f"llmctl:{toolkit.__version__}", *wanted])
    built = (
        f"docker build -t {name}"
        + (f" --build-arg 'EXTRAS=[{','.join(wanted)}]'" if wanted else "")
        + " ."
    )
    return Reckoned(name, f"this llmctl's version; build it in a checkout: {built}")


# What nodes call their GPUs: the label `nvidia.com/gpu.product`, which NVIDIA's GPU feature
# discovery writes.
#
# Its value is the device's name with hyphens for spaces, as in NVIDIA-H200 or
# NVIDIA-A100-SXM4-80GB. Where a GPU is time-sliced between pods, "-SHARED" follows; where it is
# cut up and one size is all there is, "-MIG-3g.40gb" and the like: NVIDIA/k8s-device-plugin,
# docs/gpu-feature-discovery/README.md and internal/lm/resource.go (productLabel). Neither of
# those is the whole GPU that laws are about, so they are matched only where `--gpu-product` names
# them.

LABEL = "nvidia.com/gpu.product"
OPTION = "--gpu-product"
PRODUCTS = (
    *("NVIDIA-A10", "NVIDIA-A10G", "NVIDIA-A30", "NVIDIA-A40"),
    *(
        "NVIDIA-A100-PCIE-40GB",
        "NVIDIA-A100-SXM4-40GB",
        "NVIDIA-A100-80GB-PCIe",
        "NVIDIA-A100-SXM4-80GB",
    ),
    *("NVIDIA-L4", "NVIDIA-L40", "NVIDIA-L40S"),
    *(
        "NVIDIA-H100-PCIe",
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA-H100-NVL",
        "NVIDIA-H200",
        "NVIDIA-H200-NVL",
    ),
    *("NVIDIA-B200",),
)


def products(order: Order, kind: Kind) -> Reckoned[list[str]]:
    """The label's values that a kind's workers belong on.

    Those of the option, or the GPU that was measured. Nothing was measured for an analytic fit:
    then all whose names have every word of the recipe's hardware.name ('A100-80GB' is
    'A100-SXM4-80GB' and 'A100-80GB-PCIe').
    """
    if order.options.gpu_products:
        return Reckoned(list(order.options.gpu_products), OPTION)
    if not kind.fit.engine.analytic:
        return Reckoned(
            [kind.fit.engine.device.replace(" ", "-")], "fit: the GPU that was measured"
        )
    name = kind.recipe.hardware.name
    found = [product for product in PRODUCTS if _words(name) <= _words(product)]
    if found:
        return Reckoned(
            found,
            f"every GPU called {name}, as the fit is no measurement; say otherwise with {OPTION}",
        )
    guessed = "-".join(["NVIDIA", *name.removeprefix("NVIDIA").replace("-", " ").split()])
    return Reckoned(
        [guessed],
        f"guessed from hardware.name; compare `kubectl get nodes -L {LABEL}`, and say {OPTION}",
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


# Templates for what is not YAML: shell, units, Markdown. A value that is missing is an error,
# never an empty string.
#
# What goes into them is quoted for where it stands: `sh` for a shell, `unit` for a word of a
# command in a unit, `setting` for a unit's whole value, `line` for a comment, `cell` for a
# Markdown table.


def fill(name: str, /, **values: object) -> str:
    """The template `name` with these values. `InputError` for a name that is no template's."""
    if not re.fullmatch(NAME_PATTERN, name) or not (shipped_templates() / f"{name}.j2").is_file():
        raise InputError(f"{name!r} is not the name of a template", f"names match {NAME_PATTERN}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # nothing here is HTML; every value has its own filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "unit": unit_word,
        "setting": unit_setting,
        "cell": cell,
        "line": line,
    }
    return environment.get_template(f"{name}.j2").render(**values)


def unit_setting(value: object) -> str:
    """A whole value in a unit file (systemd.unit): specifiers are doubled. `InputError` for what
    ends the line.
    """
    text = str(value)
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or text.endswith(
        "\\"
    ):
        raise InputError(f"{text!r} cannot stand in a unit file", "choose another path or name")
    return text.replace("%", "%%")


def unit_word(value: object) -> str:
    """A word of a command in a unit file (systemd.service): variables are doubled as well, and the
    rest is quoted.
    """
    doubled = unit_setting(value).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", doubled, re.ASCII):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cell(value: object) -> str:
    """Text in one cell of a Markdown table: no line breaks, no bars, no markup of its own."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", flat)


def line(value: object) -> str:
    """Text in one line of a comment."""
    return "".join(character if character.isprintable() else " " for character in str(value))
