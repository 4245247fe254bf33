"""How the workflow's files are read and written: strictly, atomically, with the digests of what they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TypedDict, TypeVar

from pydantic import BaseModel, ValidationError

import toolkit
from toolkit.errors import InputError, StaleError, nearest
from toolkit.files.envelope import Envelope, Environment, Input
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.problems import problems
from toolkit.files.profile import Profile
from toolkit.files.recipe import NAME_PATTERN, Recipe
from toolkit.files.safe_yaml import load_yaml
from toolkit.files.tuning import Tuning

MAX_FILE_BYTES = 1 << 28
DECIDING_PACKAGES = ("numba", "numpy", "optuna", "scipy", "torch", "transformers")

ModelT = TypeVar("ModelT", bound=BaseModel)
EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)
AnyPath = str | os.PathLike[str]


class Head(TypedDict):
    """The fields of `Envelope`, to be passed on as `Fit(**head(...), ...)`."""

    tool_version: str
    environment: Environment
    inputs: dict[str, Input]


def shipped_recipes() -> Path:
    """The folder of recipes inside the installed package, or the repository's in a source tree."""
    package = Path(toolkit.__file__).parent
    installed = package / "_data" / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_path(recipe: AnyPath) -> Path:
    """A recipe's file: a path that exists, or the bare name of a shipped recipe. `InputError` for neither."""
    path = Path(recipe)
    if path.is_file():
        return path
    text = os.fspath(recipe)
    if path.is_dir():
        raise InputError(f"{text}: a folder, not a recipe")
    if os.sep in text or path.suffix in (".yaml", ".yml"):
        raise InputError(f"{text}: no such file", f"shipped recipes have bare names; {_nearest_recipe(path.stem)}")
    if not re.fullmatch(NAME_PATTERN, text):
        raise InputError(f"{text!r}: neither a file nor a recipe's name", f"names match {NAME_PATTERN}")
    shipped = shipped_recipes() / f"{text}.yaml"
    if not shipped.is_file():
        raise InputError(f"{text}: no such recipe", _nearest_recipe(text))
    return shipped


def _nearest_recipe(name: str) -> str:
    return nearest(name, [path.stem for path in shipped_recipes().glob("*.yaml")])


def load_recipe(path: AnyPath) -> Recipe:
    """The recipe at `path`, or the shipped one of that name.

    Raises `InputError`: no such recipe, not YAML, or keys and values that are not a recipe's, a line for each of the
    first three. Policies are checked by those who run them: this floor does not know them.
    """
    file = recipe_path(path)
    data = load_yaml(file)
    if not isinstance(data, dict):
        shown = "empty" if data is None else f"a {type(data).__name__}, not a mapping"
        raise InputError(f"{file.name}: {shown}", "a recipe starts with `name:`; see docs/recipes.md")
    # Through JSON, because pydantic's strict mode then takes lists for tuples, and still no "5" for 5.
    return _validate(Recipe, json.dumps(data), file, "see docs/recipes.md for every key")


def read_file(model: type[EnvelopeT], path: AnyPath, inputs: Mapping[str, AnyPath] | None = None) -> EnvelopeT:
    """The workflow file at `path`, checked against the files that it was made from.

    `inputs` maps a role ('recipe', 'profile', ...) to a file whose sha256 must be the recorded one: else `StaleError`,
    naming the command that remakes `path`. Raises `InputError` for a file that is missing or of another kind.
    """
    file = Path(path)
    remade = f"make it with: {model.remake}"
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}", remade) from None
    if len(text) > MAX_FILE_BYTES:
        raise InputError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB", remade)
    content = _validate(model, text, file, remade)
    for role, source in (inputs or {}).items():
        _check_digest(content, file, role, Path(source))
    return content


def _validate(model: type[ModelT], text: str | bytes, file: Path, hint: str) -> ModelT:
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        try:
            data = json.loads(text)
        except ValueError as reason:
            raise InputError(f"{file.name}: not JSON: {reason}", hint) from None
        kind = _other_kind(model, data)
        if kind:
            raise InputError(f"{file.name}: a {kind} file, not a {model.__name__.lower()} file", hint) from None
        lines = [f"{file.name}: {line}" for line in problems(error, model, data)]
        raise InputError("\n".join(lines), hint) from None


def _other_kind(model: type[BaseModel], data: object) -> str:
    """'fit' for a whole fit.json that was given where another file is wanted, '' otherwise."""
    if not isinstance(data, dict):
        return ""
    others = [kind for kind in (Recipe, Profile, Fit, Tuning, Plan) if kind is not model]
    return next((kind.__name__.lower() for kind in others if data.keys() == kind.model_fields.keys()), "")


def _check_digest(content: Envelope, file: Path, role: str, source: Path) -> None:
    recorded = content.inputs.get(role)
    if recorded is None:
        raise StaleError(f"{file.name}: does not say from which {role} it was made", f"make it with: {content.remake}")
    now = digest(source)
    if now.sha256 != recorded.sha256:
        same_name = now.name == recorded.name
        changed = "has changed since" if same_name else f"is not {recorded.name}, which it was made from"
        raise StaleError(
            f"{file.name} is stale: its {role} {now.name} {changed} "
            f"(sha256 {recorded.sha256[:12]}, now {now.sha256[:12]})",
            f"make it again with: {content.remake}",
        )


def write_file(model: BaseModel, path: AnyPath) -> None:
    """Write a model as JSON, atomically. Fields keep the model's order: the same model gives the same bytes."""
    text = json.dumps(model.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_text(path: AnyPath, text: str) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a crash. Folders are made."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror}", "choose another place with --out") from None
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable. Some file systems cannot; the content is safe there all the same."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest(path: AnyPath) -> Input:
    """A file's name and the sha256 of its bytes."""
    file = Path(path)
    try:
        with file.open("rb") as stream:
            return Input(name=file.name, sha256=hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None


def environment(device: str = "cpu", device_memory_bytes: int | None = None) -> Environment:
    """This machine and the versions that decide the numbers. `device` is 'cpu' or the GPU's name."""
    packages = {name: version for name in DECIDING_PACKAGES if (version := _version(name))}
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        processor=_processor(),
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


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def head(inputs: Mapping[str, AnyPath], device: str = "cpu", device_memory_bytes: int | None = None) -> Head:
    """The common fields of a new file: `Fit(**head(inputs={"profile": path}), ...)`."""
    return Head(
        tool_version=toolkit.__version__,
        environment=environment(device, device_memory_bytes),
        inputs={role: digest(path) for role, path in inputs.items()},
    )
