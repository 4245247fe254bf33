"""The input and the output of a target, and helpers that targets share.

An `Order` is a plan with options; `Rendered` is the files as text, with an explanation of their
values. The helpers, in order: names of objects, images and files (refused where they could leave
their folder or mean something else), pinned images, labels of GPUs, and templates.

Templates are for what is not YAML: shell, units, Markdown. A missing value is an error, never an
empty string. Each value is quoted for its place by a filter: `sh` for a shell, `unit` for a word of
a command in a unit, `setting` for a whole value in a unit, `line` for a comment, `cell` for a
Markdown table.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass, field
from functools import cache
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

T = TypeVar("T")
SECONDS = "{} s"
MEBIBYTES = "{:,} MiB"  # forms of `explain_value`
USER_ID = 10001  # of the user of our images, in all containers
KEY_FOLDER = "/etc/llmctl"  # of the file with the API key, on a machine that runs the server
# How a client gets the key, as Markdown.
READING = """\
A client reads the key back, and sends it with each request:

```sh
export LLMCTL_API_KEY="$({command})"    # bench.sh and llmctl take it from there
# Authorization: Bearer $LLMCTL_API_KEY
```"""
ALLOW_BROKEN = "--allow-broken-limits"
# The name of a class or a Secret (RFC 1123 subdomain), or of a host.
DNS_NAME = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
DNS_LABEL = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
# Of 63 characters: the rest is for what a ReplicaSet, a pod and a ConfigMap's hash append.
MAX_OBJECT_NAME = 40

# The label of a node with the product name of its GPUs, which NVIDIA's GPU feature discovery
# writes: the device's name with hyphens for spaces, as NVIDIA-H200 or NVIDIA-A100-SXM4-80GB. A GPU
# that is time-sliced between pods has the suffix "-SHARED"; one that is partitioned in one size
# "-MIG-3g.40gb" and the like: NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery/README.md and
# internal/lm/resource.go (productLabel). Laws are about whole GPUs, so values with a suffix match
# only where `--gpu-product` names them.
LABEL = "nvidia.com/gpu.product"
OPTION = "--gpu-product"
PRODUCTS = (
    *("NVIDIA-A10", "NVIDIA-A10G", "NVIDIA-A30", "NVIDIA-A40"),
    *("NVIDIA-A100-PCIE-40GB", "NVIDIA-A100-SXM4-40GB"),
    *("NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-SXM4-80GB"),
    *("NVIDIA-L4", "NVIDIA-L40", "NVIDIA-L40S"),
    *("NVIDIA-H100-PCIe", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H100-NVL"),
    *("NVIDIA-H200", "NVIDIA-H200-NVL"),
    "NVIDIA-B200",
)


def object_name(recipe: str) -> str:
    """A name for a Service (RFC 1035), made from a recipe's name and unique to it."""
    plain = re.sub(r"[^a-z0-9]+", "-", recipe).strip("-")
    name = f"llmctl-{plain}"
    if plain == recipe and len(name) <= MAX_OBJECT_NAME:
        return name
    tail = hashlib.sha256(recipe.encode()).hexdigest()[:6]
    return f"{name[: MAX_OBJECT_NAME - 7].rstrip('-')}-{tail}"


def check_image(image: str) -> str:
    """Return a pinned `image`. `InputError` for a wrong name, and for a tag that may move."""
    found = IMAGE.fullmatch(image)
    if found is None:
        example = "for example registry.example.com/llmctl:0.1.0"
        raise InputError(f"{image!r} is not the name of an image", example)
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise InputError(
            f"image {image} is not pinned", "add a version as its tag, or a digest; never 'latest'"
        )
    return image


def inside(folder: Path, name: str) -> Path:
    """The path of a rendered file, one or two plain names below `folder`; else `InputError`.

    A template of units has an `@` before its type.
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


@dataclass(slots=True, frozen=True)
class ExplainedValue:
    """A line of EXPLAIN.md: a key of a file, its value, and where the value comes from."""

    key: str
    value: str
    source: str


def explain_value(key: str, sourced: Sourced[T], form: str = "{}") -> ExplainedValue:
    """The line of EXPLAIN.md about a value: formatted by `form`, the items of a list, or 'none'."""
    match sourced.value:
        case None:
            text = "none"
        case list(items):
            text = ", ".join(items)
        case value:
            text = form.format(value)
    return ExplainedValue(key, text, sourced.source)


def _given(value: str) -> list[str]:
    """The value of an option, if it has one."""
    return [value] if value else []


@dataclass(slots=True, frozen=True)
class Options:
    """Options of the command line. Values that no cluster takes raise `InputError`.

    Args:
        image: '': the target's pinned default.
        replicas: 0: as many as the tuning found, or 1.
        max_replicas: 0: twice the replicas.
        prometheus: the URL that KEDA queries.
        prometheus_release: the Helm release of kube-prometheus-stack: with its default values
            Prometheus reads only objects with this label; '': objects have none.
        model_claim: a volume claim with the cache of models.
        program: the path of llmctl in a unit.
        folder: the absolute path of the rendered files, for units that name them.
        prefix: the absolute path of the folder below which the files of each deployment have one
            of its name, on the machine that runs the units; '': they stay in `folder`.
        replica_image: of an engine's own server; '': the engine's pinned default.
        replica_python: the Python of the engine's environment on a machine with units.
        fronts: front pods before replicas of an engine's own servers.
        storage_class: of the claims for models; '': the cluster's default.
        image_pull_secrets: Secrets with which nodes pull images.
        priority_class: of all pods; '': the cluster's default.
        runtime_class: of pods with GPUs; '': the nodes' default.
        gateway: NAMESPACE/NAME of a Gateway that lets clients in from outside; '': none does.
        hostname: for which that Gateway does; '': for all names of its listeners.
        gpu_products: values of `nvidia.com/gpu.product`, one of which a node must have; none: nodes
            with the GPU of the fit or the recipe are preferred.
    """

    image: str = ""
    namespace: str = "default"
    replicas: int = 0
    max_replicas: int = 0
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    prometheus_release: str = ""
    model_claim: str = ""
    program: str = "/opt/llmctl/bin/llmctl"
    folder: str = ""
    prefix: str = ""
    gpu_products: tuple[str, ...] = ()
    fronts: int = 1
    storage_class: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str = ""
    runtime_class: str = ""
    gateway: str = ""
    hostname: str = ""
    replica_image: str = ""
    replica_python: str = "/opt/vllm/bin/python"

    def __post_init__(self) -> None:
        name = "not a name that Kubernetes takes"
        label = name, f"names match {DNS_LABEL}"
        dotted = name, "lower-case letters, digits, '-' and '.'"
        route = "not NAMESPACE/NAME", "`kubectl get gateways -A` lists them"
        path = "not a plain absolute path", "like /etc/llmctl; letters, digits, '.', '_' and '-'"
        release = "not the name of a release", f"`helm list -A` shows it; names match {DNS_LABEL}"
        product = "not the value of a label", "like NVIDIA-H200; no spaces, 63 characters"
        url = "not a plain URL", "like http://prometheus.monitoring.svc:9090"
        # Each value that was given, its pattern, what else it is, and a hint.
        checks = [
            ("--namespace", [self.namespace], DNS_LABEL, label),
            ("--model-claim", _given(self.model_claim), DNS_LABEL, label),
            ("--storage-class", _given(self.storage_class), DNS_NAME, dotted),
            ("--priority-class", _given(self.priority_class), DNS_NAME, dotted),
            ("--runtime-class", _given(self.runtime_class), DNS_NAME, dotted),
            ("--hostname", _given(self.hostname), DNS_NAME, dotted),
            ("--image-pull-secret", self.image_pull_secrets, DNS_NAME, dotted),
            ("--gateway", _given(self.gateway), rf"{DNS_LABEL}/{DNS_NAME}", route),
            ("--prefix", _given(self.prefix), r"(/[A-Za-z0-9._-]+)+", path),
            ("--prometheus-release", _given(self.prometheus_release), DNS_LABEL, release),
            ("--gpu-product", self.gpu_products, VALUE_PATTERN, product),
            ("--prometheus", [self.prometheus], r"https?://[A-Za-z0-9._:/-]+", url),
        ]
        for option, values, pattern, (problem, hint) in checks:
            for value in values:
                if not re.fullmatch(pattern, value):
                    raise InputError(f"{option} {value!r}: {problem}", hint)
        if self.hostname and not self.gateway:
            raise InputError("--hostname needs --gateway", "add --gateway NAMESPACE/NAME")


@dataclass(slots=True, frozen=True)
class Order:
    """A plan with everything that a target may need.

    `text` is the plan's file, `digest` its sha256. `validation` has the errors of the fit's
    predictions, if they were measured. `trace` is the traffic for the autoscaling threshold.
    """

    plan: Plan
    text: str
    digest: str
    options: Options = field(default_factory=Options)
    validation: Validation | None = None
    trace: Trace | None = None

    @property
    def name(self) -> str:
        """The name of objects and units."""
        return object_name(self.plan.recipe.name)

    @property
    def key_file(self) -> str:
        """The path of the API key on a machine that runs the server."""
        return f"{KEY_FOLDER}/{self.name}.key"

    @property
    def reading_the_key(self) -> str:
        """How a client on that machine reads the key back, as Markdown."""
        return READING.format(command=f"sudo cat {self.key_file}")

    @property
    def allowances(self) -> list[str]:
        """Options of `llmctl serve` that a plan needs which is predicted to break limits."""
        return [ALLOW_BROKEN] if broken(self.plan.limits) else []

    def stamp(self) -> dict[str, str]:
        """The origin that every rendered file records: role to sha256."""
        digests = {}
        for role in ("profile", "fit", "tuning"):
            if role in self.plan.inputs:
                digests[role] = self.plan.inputs[role].sha256
                if not re.fullmatch(r"[0-9a-f]{64}", digests[role]):
                    raise InputError(
                        f"plan.json: inputs.{role}.sha256 is not a sha256",
                        f"make it with: {Plan.remake}",
                    )
        return digests | {"plan": self.digest}

    def comment(self) -> str:
        """The stamp as a comment for the head of a file."""
        head = "Rendered by llmctl; EXPLAIN.md says where each value comes from."
        lines = [f"{role}.json sha256 {digest}" for role, digest in self.stamp().items()]
        return "\n".join([head, *lines])

    def fill(self, template: str, /, **values: object) -> str:
        """Fill a template with these values, and with the stamp as its `comment`."""
        return _templates().get_template(f"{template}.j2").render(comment=self.comment(), **values)


def proxy_file(order: Order) -> dict[str, str]:
    """The configuration of a proxy for where strangers reach the server (docs/how-to/expose.md)."""
    port = order.plan.recipe.serve.port or 8000
    return {"nginx.conf": order.fill("nginx.conf", name=order.name, port=port)}


@dataclass(slots=True, frozen=True)
class Rendered:
    """The files of a target by name, the explanation of their values, and how to start them.

    `url` is the address of the server, where it differs from the recipe's.
    """

    files: dict[str, str]
    explained: list[ExplainedValue]
    start: str
    url: str = ""


IN_EVERY_IMAGE = "engines"  # an extra that the Dockerfile installs


def llmctl_image(order: Order, *, engine: bool = True) -> Sourced[str]:
    """The image with llmctl and the recipe's engine, unless its servers have images of their own.

    Raises `InputError` where the image of the command line is not pinned.
    """
    if order.options.image:
        image = check_image(order.options.image)
        source = "--image"
        if "@sha256:" not in image:
            source += f"; NOT PINNED: a tag may be moved, {image}@sha256:... may not"
        return Sourced(image, source)
    kinds = order.plan.kinds if engine else []
    needed = {traits_of(kind.recipe.engine.name).extra for kind in kinds}
    wanted = sorted(needed - {"", IN_EVERY_IMAGE})
    name = "-".join([f"llmctl:{toolkit.__version__}", *wanted])
    arguments = f" --build-arg 'EXTRAS=[{','.join(wanted)}]'" if wanted else ""
    build = f"docker build -t {name}{arguments} ."
    return Sourced(name, f"this llmctl's version; build it in a checkout: {build}")


def products(order: Order, kind: Kind) -> Sourced[list[str]]:
    """The values of `LABEL` for nodes that suit a kind's workers.

    They come from the option, or are the GPU that was measured. For an analytic fit, they are all
    names with every word of the recipe's hardware.name ('A100-80GB' matches 'A100-SXM4-80GB' and
    'A100-80GB-PCIe').
    """
    if order.options.gpu_products:
        return Sourced(list(order.options.gpu_products), OPTION)
    if not kind.fit.engine.analytic:
        device = kind.fit.engine.device.replace(" ", "-")
        return Sourced([device], "fit: the GPU that was measured")
    name = kind.recipe.hardware.name
    found = [product for product in PRODUCTS if _words(name) <= _words(product)]
    if found:
        source = f"every GPU called {name}, as the fit is not measured; change it with {OPTION}"
        return Sourced(found, source)
    guessed = "-".join(["NVIDIA", *name.removeprefix("NVIDIA").replace("-", " ").split()])
    check = f"compare `kubectl get nodes -L {LABEL}`, and correct it with {OPTION}"
    return Sourced([guessed], f"guessed from hardware.name; {check}")


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


@cache  # a command fills several templates
def _templates() -> jinja2.Environment:
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
    return environment


def unit_setting(value: object) -> str:
    """Quote a whole value of a unit file (systemd.unit): specifiers are doubled.

    Raises `InputError` for control characters and for a backslash at the end.
    """
    text = str(value)
    control = any(ord(character) < 32 or ord(character) == 127 for character in text)
    if control or text.endswith("\\"):
        raise InputError(f"{text!r} cannot stand in a unit file", "choose another path or name")
    return text.replace("%", "%%")


def unit_word(value: object) -> str:
    """Quote a word of a command in a unit file (systemd.service): `$` is doubled too."""
    doubled = unit_setting(value).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", doubled, re.ASCII):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cell(value: object) -> str:
    """Text for a cell of a Markdown table: one line, with markup escaped."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", flat)


def line(value: object) -> str:
    """Text for one line of a comment."""
    return "".join(character if character.isprintable() else " " for character in str(value))
