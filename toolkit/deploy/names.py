"""Names that files, clusters and units take: refused where they could leave their folder or mean something else."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.recipe import NAME_PATTERN

IMAGE = re.compile(
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]{1,5})?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?P<digest>@sha256:[0-9a-f]{64})?"
)
OBJECT_LENGTH = 40  # of 63: what a ReplicaSet, a pod and a ConfigMap's hash append must fit, too


def object_name(recipe: str) -> str:
    """A name that a Service takes (RFC 1035), of a recipe's name; different recipes have different ones."""
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
        raise InputError(f"{image!r} is not the name of an image", "for example registry.example.com/llmctl:0.1.0")
    if not found["digest"] and found["tag"] in (None, "latest"):
        raise InputError(f"image {image} is not pinned", "add a version as its tag, or a digest; never 'latest'")
    return image


def inside(folder: Path, name: str) -> Path:
    """The path of a rendered file: one or two plain names below `folder`. `InputError` for anything else."""
    parts = name.split("/")
    if len(parts) > 2 or not all(re.fullmatch(NAME_PATTERN, part.lower()) for part in parts):
        raise InputError(f"{name!r} is not the name of a rendered file", f"names match {NAME_PATTERN}")
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{name}: a link leads out of {folder}", "remove the link, or choose another folder")
    return path
