"""How the workflow's files are read and written: strictly, atomically, with the digests of what
they were made from.

This is the room's front door; what it imports under the same name is meant to be imported from
here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import secrets
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypedDict, TypeVar

from pydantic import BaseModel

import toolkit
from toolkit.errors import InputError, StaleError
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind, Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import NAME_PATTERN, Recipe
from toolkit.files.shipped import (
    load_recipe,
    nearest_shipped,
    recipe_path,
    shipped_profiles,
    shipped_recipes,
    siblings,
)
from toolkit.files.strict import Envelope, Environment, Input, read_bytes, validate
from toolkit.files.tuning import Tuning

# What a file was made from: recorded when it is written, compared when it is read.
#
# Of a recipe, each section is recorded by its content: a new latency target makes a tuning stale,
# not a profile, and a comment makes nothing stale.

AnyPath = str | os.PathLike[str]
WORKFLOW_ROLES = ("profile", "fit", "tuning", "plan")


class _MadeFrom(BaseModel):
    """Any workflow file, as far as its inputs go."""

    inputs: dict[str, Input]


def digest(path: AnyPath) -> Input:
    """A file's name and the sha256 of its bytes."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            return Input(name=file.name, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None


def record_inputs(inputs: Mapping[str, AnyPath]) -> dict[str, Input]:
    """Role to input, for `Envelope.inputs`. What workflow files among them were made from comes
    along.
    """
    recorded: dict[str, Input] = {}
    for (
        role,
        path,
    ) in inputs.items():  # of a fleet's further kinds (`fit.2`) the files themselves suffice
        if role in WORKFLOW_ROLES:
            recorded |= validate(_MadeFrom, read_bytes(Path(path)), Path(path), "").inputs
    return recorded | {role: _digest_as(role, path) for role, path in inputs.items()}


def _digest_as(role: str, path: AnyPath) -> Input:
    found = digest(path)
    return (
        found.model_copy(update={"sections": _section_digests(path)}) if _is_recipe(role) else found
    )


def _is_recipe(role: str) -> bool:
    return role == "recipe" or role.startswith("recipe.")


def _section_digests(path: AnyPath) -> dict[str, str]:
    """The sha256 of each section's content. What equals its default does not count, so that new
    keys age no file.
    """
    sections = load_recipe(path).model_dump(mode="json", exclude_defaults=True)
    return {
        name: hashlib.sha256(_canonical(content)).hexdigest() for name, content in sections.items()
    }


def _canonical(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def check_input(content: Envelope, file: Path, role: str, source: Path) -> None:
    """`StaleError` where `source` is not what `content`, read from `file`, was made from under
    `role`.

    It says whether that is another recipe, or the same one, changed since.
    """
    recorded = content.inputs.get(role)
    if recorded is None:
        raise StaleError(
            f"{file.name}: does not say from which {role} it was made",
            f"make it with: {content.remake}",
        )
    if _is_recipe(role) and recorded.sections and content.recipe_sections:
        _check_sections(content, file, recorded, source)
        return
    now = digest(source)
    if now.sha256 != recorded.sha256:
        same_name = now.name == recorded.name
        changed = (
            "has changed since" if same_name else f"is not {recorded.name}, which it was made from"
        )
        digests = f"(sha256 {recorded.sha256[:12]}, now {now.sha256[:12]})"
        raise StaleError(
            f"{file.name} is stale: its {role} {now.name} {changed} {digests}",
            f"make it again: {content.remake}",
        )


def _check_sections(content: Envelope, file: Path, recorded: Input, source: Path) -> None:
    now = _section_digests(source)
    changed = [
        name for name in content.recipe_sections if now.get(name) != recorded.sections.get(name)
    ]
    if not changed:
        return
    remake = content.remeasure or content.remake
    if now["name"] != recorded.sections.get("name"):
        made_for = getattr(content, "recipe_name", recorded.name)
        name = load_recipe(source).name
        raise StaleError(
            f"{file.name} is of recipe '{made_for}', not '{name}'",
            f"make one of '{name}': {remake}",
        )
    names = ", ".join(f"'{name}'" for name in changed)
    raise StaleError(
        f"{file.name} is stale: {names} of {source.name} changed since it was made from {recorded.name}",
        f"make it again: {remake}",
    )


__all__ = [
    "EnvelopeFields",
    "check_writable",
    "digest",
    "environment",
    "file_text",
    "head",
    "load_recipe",
    "processor",
    "read_file",
    "recipe_path",
    "write_bytes",
    "write_file",
    "write_text",
]

DECIDING_PACKAGES = ("numba", "numpy", "optuna", "scipy", "torch", "transformers")
KINDS = (Recipe, Profile, Fit, Tuning, Plan)

EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)


class EnvelopeFields(TypedDict):
    """The fields of `Envelope`, to be passed on as `Fit(**head(...), ...)`."""

    tool_version: str
    environment: Environment
    inputs: dict[str, Input]


def read_file(
    model: type[EnvelopeT], path: AnyPath, inputs: Mapping[str, AnyPath] | None = None
) -> EnvelopeT:
    """The workflow file at `path`, checked against the files that it was made from.

    `inputs` maps a role ('recipe', 'profile', ...) to the file that must be the one recorded under
    it: else `StaleError`, naming what changed and the command that remakes `path`. Raises
    `InputError` for a file that is missing or of another kind.
    """
    file = Path(path)
    remade = f"make it with: {model.remake}"
    content = validate(model, read_bytes(file, remade), file, remade, KINDS)
    for role, source in (inputs or {}).items():
        check_input(content, file, role, Path(source))
    return content


def write_file(model: BaseModel, path: AnyPath) -> None:
    """Write a model as JSON, atomically."""
    write_text(path, file_text(model))


def file_text(model: BaseModel) -> str:
    """A model as it is written. Fields keep the model's order: the same model gives the same text."""
    return (
        json.dumps(model.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
        + "\n"
    )


def write_text(path: AnyPath, text: str) -> None:
    """`write_bytes` of UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a crash.
    Folders are made.

    Behind a link, the file that the link names is replaced. What is no regular file (/dev/stdout, a
    pipe) is written to: a device must never be replaced by a file.
    """
    target = Path(path).resolve()
    temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: AnyPath) -> None:
    """`InputError` where no file can be written at `path`: asked before work whose result would be
    lost.

    Makes the folder, and nothing else that lasts.
    """
    target = Path(path).resolve()
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not target.exists() or target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=target.parent):
                pass
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: AnyPath, error: OSError) -> InputError:
    return InputError(
        f"{os.fspath(path)}: cannot be written: {error.strerror}", "choose another place"
    )


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Some file systems cannot; the content is safe there all the
    same.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def environment(device: str = "cpu", device_memory_bytes: int | None = None) -> Environment:
    """This machine and the versions that decide the numbers. `device` is 'cpu' or the GPU's name."""
    packages = {name: version for name in DECIDING_PACKAGES if (version := _version(name))}
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor(),
        cpu_count=os.cpu_count() or 1,
        packages=packages,
        device=device,
        device_memory_bytes=device_memory_bytes,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def processor() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def head(
    inputs: Mapping[str, AnyPath], device: str = "cpu", device_memory_bytes: int | None = None
) -> EnvelopeFields:
    """The common fields of a new file: `Fit(**head(inputs={"profile": path}), ...)`.

    What the inputs were themselves made from is recorded too, so a fit knows its recipe.
    """
    return EnvelopeFields(
        tool_version=toolkit.__version__,
        environment=environment(device, device_memory_bytes),
        inputs=record_inputs(inputs),
    )


# Finding fits: files, and those that ship under the names of their recipes.

FIT = "fit.json"


def fit_path(fit: AnyPath) -> Path:
    """A fit's file: a path, or the bare name of a recipe whose fit ships. `InputError` for a name
    of neither.

    What looks like a file and is not there is left for whoever reads it to say.
    """
    path, text = Path(fit), os.fspath(fit)
    if path.exists() or path.suffix == ".json" or not re.fullmatch(NAME_PATTERN, text):
        return path
    return shipped_fit(text) or _unknown(text)


def shipped_fits() -> list[str]:
    """The names of the recipes whose fits ship."""
    return sorted(path.parent.name for path in shipped_profiles().glob(f"*/{FIT}"))


def shipped_fit(recipe: str) -> Path | None:
    """The fit that ships for the shipped recipe of this name; None: there is none."""
    path = shipped_profiles() / recipe / FIT
    return path if re.fullmatch(NAME_PATTERN, recipe) and path.is_file() else None


def find_recipe(fit: Fit, path: Path) -> Recipe | None:
    """The recipe that the fit at `path` was made from, by the name of its file; None: it is not
    found.

    Of a fit that ships it is the recipe that ships; else it lies beside the fit, in the working
    folder, or ships. One whose measured sections have changed since is not the fit's.
    """
    shipped = shipped_recipes() / f"{fit.recipe_name}.yaml"
    made_from = fit.inputs.get("recipe")
    if made_from is None or not re.fullmatch(NAME_PATTERN, fit.recipe_name):
        return None
    name = Path(made_from.name).name
    own = path.resolve().is_relative_to(shipped_profiles().resolve())
    for candidate in [shipped] if own else [path.parent / name, Path(name), shipped]:
        if candidate.is_file():
            try:
                check_input(fit, path, "recipe", candidate)
                return load_recipe(candidate)
            except InputError:
                continue
    return None


def shipped_siblings(recipe: Recipe) -> list[Kind]:
    """The recipes that ship for `recipe`'s model and GPU with another engine, each with its shipped
    fit.
    """
    found = [(path, shipped_fit(path.stem)) for path in siblings(recipe)]
    kinds = [
        (load_recipe(path), read_file(Fit, fit, {"recipe": path})) for path, fit in found if fit
    ]
    return [Kind(recipe=sibling, fit=fit, workers=sibling.workers) for sibling, fit in kinds]


def _unknown(name: str) -> Path:
    raise InputError(
        f"{name}: no such file, and no fit of that name ships",
        nearest_shipped(name, shipped_fits()),
    )
