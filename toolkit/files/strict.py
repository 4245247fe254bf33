"""What all files share: strict models, the common head, and reading and writing JSON and YAML.

The parts, in order: `Strict` and `Envelope`, the head of the workflow's JSON files; JSON, with
errors that name key, value and remedy; YAML.

YAML is read as one document of plain data in YAML 1.2's core schema, with bounds. PyYAML's safe
loader accepts duplicate keys (the last wins), anchors and aliases (which can blow a small file up
to gigabytes), and YAML 1.1's surprises: `no` is false, `1e-3` a string, `1:30` ninety. Here the
first two and tags are errors with their line, and scalars are read as by editors and JSON Schema.

YAML is written in block style, with text quoted unless plain. PyYAML writes `1e3`, `0o17` and
`1_000` unquoted, which YAML 1.2 readers such as Kubernetes and Compose take for numbers, and `y`
and `12:30`, which YAML 1.1 does not take for text. Here all that is not printable ASCII is escaped,
too, so no value can become a key, a comment or a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import InputError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# Of the workflow's files, but for those with laws. It grows where an earlier file would be
# misunderstood.
FORMAT: Literal[2] = 2
LONG_KEY = 80  # characters of a key in a message
MAX_LINES = 3  # of problems in one error
MAX_FILE_BYTES = 1 << 28  # of JSON
# The share of equal keys above which a file is taken for another kind. A fit and a profile, the
# most similar kinds, share two thirds.
SAME_KIND = 0.7
MAX_YAML_BYTES = 1 << 20
MAX_DOCUMENTS_BYTES = 4 << 20
MAX_YAML_DEPTH = 16

Location = Sequence[int | str]
ModelT = TypeVar("ModelT", bound=BaseModel)


class Strict(BaseModel):
    """An immutable model that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


def optional(description: str) -> Any:
    """A field that is None where it is not given."""
    return Field(None, description=description)


class Environment(Strict):
    """The machine and the versions that a file was made with, without host names and paths."""

    python: str
    platform: str
    processor: str
    cpu_count: int
    packages: dict[str, str] = Field(description="versions of the packages that decide the numbers")
    device: str = Field(description="cpu, or the GPU's name")
    device_memory_bytes: int | None = None


class Input(Strict):
    """A file that another file was made from."""

    name: str = Field(description="file name without its folder")
    sha256: str
    sections: dict[str, str] = Field(
        default_factory=dict, description="of a recipe: the sha256 of each section's content"
    )


class Envelope(Strict):
    """The common head of profile.json, fit.json, tuning.json and plan.json. The files with laws
    have a format of their own (`fit.LAWS_FORMAT`).
    """

    remake: ClassVar[str] = ""  # the command that makes this kind of file, for error messages
    remeasure: ClassVar[str] = ""  # the commands after a change of the recipe, if there are more
    recipe_sections: ClassVar[tuple[str, ...]] = ()  # sections that this kind of file depends on

    schema_version: Literal[2] = FORMAT
    tool_version: str
    environment: Environment
    inputs: dict[str, Input] = Field(
        description="role (recipe, profile, fit, trace, ...) to file, with the inputs' own inputs"
    )


def problems(error: ValidationError, model: type[BaseModel], data: object) -> list[str]:
    """The first three problems of `data`, a line each with the key's path; how many others."""
    errors = error.errors(include_url=False)
    # Unknown keys first: a misspelt key explains a missing one.
    errors.sort(key=lambda details: details["type"] != "extra_forbidden")
    lines: dict[str, str] = {}
    for details in errors:
        where = _real_location(details, data)
        if details["type"] == "missing" and any(
            f"did you mean '{where[-1]}'" in line for line in lines.values()
        ):
            continue
        lines.setdefault(_path(where), _line(details, where, model))
    shown = list(lines.values())[:MAX_LINES]
    if len(lines) > MAX_LINES:
        shown[-1] += f" (and {len(lines) - MAX_LINES} more)"
    return shown


def _line(details: ErrorDetails, where: Location, model: type[BaseModel]) -> str:
    path = _path(where)
    match details["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key; {_suggest(str(where[-1]), where[:-1], model)}"
        case "missing":
            return f"{path}: missing"
        case "value_error":
            text = details["msg"].removeprefix("Value error, ")
            return f"{path}: {text}" if path else text
    text = details["msg"].replace("Input should be", "should be")
    text = text.replace("Keys should", "key should")
    return f"{path}: {_shown(details['input'])}: {text}" if path else text


def _shown(value: object) -> str:
    """A value, shortened for a message."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _path(where: Location) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:LONG_KEY]}" for part in where)
    return "".join(parts).lstrip(".")


def _real_location(details: ErrorDetails, data: object) -> Location:
    """The location without the parts that pydantic adds: the branch of a union, `[key]`."""
    loc = details["loc"]
    for depth, part in enumerate(loc):
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return loc[: depth + 1] if details["type"] == "missing" else loc[:depth]
    return loc


def _suggest(key: str, parents: Location, model: type[BaseModel]) -> str:
    """A hint for an unknown key: its right place in the file, else the nearest key beside it."""
    elsewhere = [path for path in _all_paths(model) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    for part in parents:
        # a part may also be a place in a list or a key of a mapping
        inner = model.model_fields.get(str(part))
        model = (_model_in(inner.annotation) if inner else None) or model
    return nearest(key, model.model_fields)


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from _all_paths(inner, f"{prefix}{name}.")


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model inside `list[X]`, `dict[str, X]`, `X | None`, or X itself."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)


def read_bytes(file: Path, hint: str = "", most_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a whole file. `InputError` where it cannot be read or is larger than `most_bytes`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(most_bytes + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}", hint) from None
    if len(content) > most_bytes:
        raise InputError(f"{file}: larger than {most_bytes >> 20} MiB", hint)
    return content


def validate(
    model: type[ModelT],
    text: str | bytes,
    file: Path,
    hint: str,
    kinds: Sequence[type[BaseModel]] = (),
) -> ModelT:
    """Parse and check `text` as a `model`.

    `InputError` has a line for each of the first problems, with key, value and remedy. Where `file`
    is of one of the other `kinds`, the error names that kind, and where it is of another format,
    both numbers.
    """
    data = parse_json(text, file, hint)
    if issubclass(model, Envelope) and isinstance(data, dict):
        known = model.model_fields["schema_version"].default
        found = data.get("schema_version", known)
        if found != known and not _other_kind(model, data, kinds):
            problem = f"{file.name}: format {_shown(found)}; this llmctl reads format {known}"
            raise InputError(problem, hint)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        if kind := _other_kind(model, data, kinds):
            problem = f"{file.name}: a {kind} file, not a {model.__name__.lower()} file"
            raise InputError(problem, hint) from None
        lines = [f"{file.name}: {line}" for line in problems(error, model, data)]
        raise InputError("\n".join(lines), hint) from None


def parse_json(text: str | bytes, file: Path, hint: str = "") -> object:
    """Parse JSON in UTF-8 without duplicate keys. `InputError` in one line otherwise."""

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{file.name}: the key {twice[:80]!r} occurs twice", hint)
        return content

    def bounded(digits: str) -> int:
        """Beyond 64 bits a number cannot be calculated with as the others."""
        if len(digits) > 19 and not -(1 << 63) <= int(digits[:24]) < 1 << 64:
            raise InputError(f"{file.name}: {digits[:20]}...: too large a number", hint)
        return int(digits)

    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        if not decoded.strip():
            raise InputError(f"{file.name}: empty", hint)
        data: object = json.loads(decoded, object_pairs_hook=no_duplicates, parse_int=bounded)
    except UnicodeDecodeError as error:
        problem = f"{file.name}: not text: byte {error.start + 1} is not UTF-8"
        raise InputError(problem, hint) from None
    except ValueError as error:
        raise InputError(f"{file.name}: not JSON: {error}", hint) from None
    except RecursionError:
        raise InputError(f"{file.name}: nested too deep", hint) from None
    return data


def _other_kind(model: type[BaseModel], data: object, kinds: Sequence[type[BaseModel]]) -> str:
    """The kind of file, of any version, that `data` is, such as 'fit'; '' for a `model`."""
    if not isinstance(data, dict):
        return ""

    def similarity(kind: type[BaseModel]) -> float:
        """The number of common keys over the number of all keys."""
        keys = kind.model_fields.keys()
        return len(data.keys() & keys) / len(data.keys() | keys)

    best = max([model, *kinds], key=similarity)
    return best.__name__.lower() if best is not model and similarity(best) >= SAME_KIND else ""


def load_yaml(path: Path) -> object:
    """The document in `path`, as dicts, lists and scalars; `InputError` with line and column."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_YAML_BYTES:
        limit = f"{MAX_YAML_BYTES >> 20} MiB"
        raise InputError(f"{path.name}: larger than {limit}", "a recipe is a page or two of text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"{path.name}: byte {error.start} is not UTF-8"
        raise InputError(problem, "save the file as UTF-8") from None
    try:
        return _RecipeLoader(text).get_single_data()
    except _RefusedError as error:
        raise InputError(f"{path.name}: {error}") from None
    except yaml.YAMLError as error:
        problem = f"not YAML: {error}"
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            mark = error.problem_mark
            problem = f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"
        elif isinstance(error, yaml.reader.ReaderError):
            problem = f"character {error.position} is not allowed in YAML: {error.reason}"
        hint = "check the indentation and quotes there"
        raise InputError(f"{path.name}: {problem}", hint) from None


def load_documents(path: Path) -> list[object]:
    """Return the documents of a YAML file that other programs read, too. Raises `InputError` with
    the line where it is not YAML.
    """
    text = read_bytes(path, most_bytes=MAX_DOCUMENTS_BYTES)
    return documents(text, str(path), "where it is a template, render it first: helm template")


def documents(text: str | bytes, name: str, hint: str) -> list[object]:
    """Return the documents of a text. Raises `InputError` with its name and the line where it is
    not YAML.
    """
    try:
        return [*yaml.safe_load_all(text)]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(f"{name}{where}: not YAML", hint) from None


def yaml_value(text: str, where: str) -> Any:
    """Return the value that a recipe's YAML has for this text. Raises `InputError` where it has
    none; `where` begins its message.
    """
    try:
        return _RecipeLoader(text).get_single_data()
    except (_RefusedError, yaml.YAMLError) as error:
        problem = str(error).partition("\n")[0]
        raise InputError(f"{where}: not a value: {problem}", "write it as in a recipe") from None


class _RefusedError(Exception):
    """Well-formed YAML that is not allowed here."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader without anchors, aliases, tags, duplicate keys, deep nesting and 1.1 scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs lack it
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(f"alias *{event.anchor}: write the value out", mark)
        if event.anchor is not None:
            raise _RefusedError(f"anchor &{event.anchor}: anchors are not allowed", mark)
        if event.tag is not None:
            raise _RefusedError(f"tag {event.tag}: tags are not allowed", mark)
        if self.depth >= MAX_YAML_DEPTH:
            raise _RefusedError(f"nested more than {MAX_YAML_DEPTH} deep", mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise _RefusedError("half a surrogate pair is not text", node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
                raise _RefusedError(f"key {shown}: keys must be text", key.start_mark)
            if key.value in seen:
                raise _RefusedError(
                    f"duplicate key '{key.value}', first on line {seen[key.value]}", key.start_mark
                )
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


# YAML 1.2, section 10.3.2 (core schema), without octal and hexadecimal numbers. PyYAML would read
# 010 as octal.
_RecipeLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]{1,18}$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|nan)$",
        list("-+.0123456789"),
    ),
):
    _RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
