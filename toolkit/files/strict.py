"""What every file of the workflow shares: strict models, versions, environment, and the digests of
its inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import InputError, nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


class Strict(BaseModel):
    """A model that refuses unknown keys, NaN and infinity, and does not change once read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )


class Environment(Strict):
    """The machine and the versions a file was made with. No host names, no paths."""

    python: str
    platform: str
    processor: str
    cpu_count: int
    packages: dict[str, str] = Field(description="versions of the packages that decide the numbers")
    device: str = Field(description="cpu, or the GPU's name")
    device_memory_bytes: int | None = None


class Input(Strict):
    """A file that another was made from."""

    name: str = Field(description="file name without its folder")
    sha256: str
    sections: dict[str, str] = Field(
        default_factory=dict, description="of a recipe: the sha256 of each section's content"
    )


class Envelope(Strict):
    """The common head of profile.json, fit.json, tuning.json and plan.json."""

    remake: ClassVar[str] = ""  # the command that makes this kind of file, for error messages
    remeasure: ClassVar[str] = ""  # the same where the recipe changed, if that takes more
    recipe_sections: ClassVar[tuple[str, ...]] = ()  # those that this kind of file depends on

    schema_version: Literal[1] = 1
    tool_version: str
    environment: Environment
    inputs: dict[str, Input] = Field(
        description="role (recipe, profile, fit, trace, ...) to file, theirs included"
    )


# What pydantic found wrong, in lines that a person can act on: the key's path, the value, what is
# right.

Location = Sequence[int | str]
MAX_LINES = 3


def problems(error: ValidationError, model: type[BaseModel], data: object) -> list[str]:
    """One line per problem, the first three, and how many more there are. `data` is what was
    validated.
    """
    found = error.errors(include_url=False)
    found.sort(
        key=lambda details: details["type"] != "extra_forbidden"
    )  # a misspelt key explains a missing one
    lines: dict[str, str] = {}
    for details in found:
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
    text = (
        details["msg"].replace("Input should be", "should be").replace("Keys should", "key should")
    )
    return f"{path}: {_shown(details['input'])}: {text}" if path else text


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _path(where: Location) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(
        "."
    )


def _real_location(details: ErrorDetails, data: object) -> Location:
    """`loc` without what pydantic appends to it: the branch of a union, `[key]`."""
    loc = details["loc"]
    for depth, part in enumerate(loc):
        try:
            data = data[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return loc[: depth + 1] if details["type"] == "missing" else loc[:depth]
    return loc


def _suggest(key: str, parents: Location, model: type[BaseModel]) -> str:
    """The right key: the same name elsewhere in the file, else the nearest of its siblings."""
    elsewhere = [path for path in _all_paths(model) if path.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    for part in parents:
        inner = None if isinstance(part, int) else _model_in(model.model_fields[part].annotation)
        model = inner or model
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


# From text to a checked model, with errors that a person can act on.

MAX_FILE_BYTES = 1 << 28
ALIKE = 0.7  # of the keys; a fit and a profile, the most alike of different kinds, share two thirds

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_bytes(file: Path, hint: str = "") -> bytes:
    """A whole file. `InputError` where it cannot be read or is too large to be one of ours."""
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}", hint) from None
    if len(content) > MAX_FILE_BYTES:
        raise InputError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB", hint)
    return content


def validate(
    model: type[ModelT],
    text: str | bytes,
    file: Path,
    hint: str,
    kinds: Sequence[type[BaseModel]] = (),
) -> ModelT:
    """`text` as a `model`. `InputError` with a line for each of the first problems, naming key,
    value and remedy.

    `kinds` are what `file` might be instead: where it is, the error says so.
    """
    data = parse_json(text, file, hint)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        kind = _other_kind(model, data, kinds)
        if kind:
            raise InputError(
                f"{file.name}: a {kind} file, not a {model.__name__.lower()} file", hint
            ) from None
        lines = [f"{file.name}: {line}" for line in problems(error, model, data)]
        raise InputError("\n".join(lines), hint) from None


def parse_json(text: str | bytes, file: Path, hint: str = "") -> object:
    """What JSON says, each key once. `InputError`, in one line, for what is not JSON in UTF-8."""

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        content = dict(pairs)
        if len(content) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise InputError(f"{file.name}: the key {twice[:80]!r} is there twice", hint)
        return content

    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        if not decoded.strip():
            raise InputError(f"{file.name}: empty", hint)
        data: object = json.loads(decoded, object_pairs_hook=no_duplicates)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file.name}: not text: byte {error.start + 1} is not UTF-8", hint
        ) from None
    except ValueError as error:
        raise InputError(f"{file.name}: not JSON: {error}", hint) from None
    except RecursionError:
        raise InputError(f"{file.name}: nested too deep", hint) from None
    return data


def _other_kind(model: type[BaseModel], data: object, kinds: Sequence[type[BaseModel]]) -> str:
    """'fit' for a fit.json, also of another version, that was given where another file is wanted,
    '' otherwise.
    """
    if not isinstance(data, dict):
        return ""

    def likeness(kind: type[BaseModel]) -> float:  # the keys they share, of all that either has
        return len(data.keys() & kind.model_fields.keys()) / len(
            data.keys() | kind.model_fields.keys()
        )

    nearest = max([model, *kinds], key=likeness)
    return nearest.__name__.lower() if nearest is not model and likeness(nearest) >= ALIKE else ""


# YAML as recipes may use it: one document of plain data in YAML 1.2's core schema, with bounds.
#
# PyYAML's safe loader still accepts duplicate keys (the last one wins), anchors and aliases
# (which can blow a small file up to gigabytes), and YAML 1.1's surprises: `no` is false, `1e-3` a
# string, `1:30` ninety. Here the first two and tags are errors that name their line, and scalars
# are read the way editors and JSON Schema read them.

MAX_BYTES = 1 << 20
MAX_DEPTH = 16


def load_yaml(path: Path) -> object:
    """The document in `path`, as dicts, lists and scalars. `InputError` names the line and column
    of what is wrong.
    """
    text = _read_text(path)
    try:
        return _RecipeLoader(text).get_single_data()
    except _RefusedError as error:
        raise InputError(f"{path.name}: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(
            f"{path.name}: {_describe(error)}", "check the indentation and quotes there"
        ) from None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise InputError(
            f"{path.name}: larger than {MAX_BYTES >> 20} MiB", "a recipe is a page or two of text"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name}: byte {error.start} is not UTF-8", "save the file as UTF-8"
        ) from None


def _describe(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position} is not allowed in YAML: {error.reason}"
    return f"not YAML: {error}"


class _RefusedError(Exception):
    """YAML that is well formed and not allowed here."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader without anchors, aliases, tags, duplicate keys, deep nesting and the YAML 1.1
    scalars.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs lack it
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(f"alias *{event.anchor}: write the value out", event.start_mark)
        if event.anchor is not None:
            raise _RefusedError(
                f"anchor &{event.anchor}: anchors are not allowed", event.start_mark
            )
        if event.tag is not None:
            raise _RefusedError(f"tag {event.tag}: tags are not allowed", event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise _RefusedError(f"nested more than {MAX_DEPTH} deep", event.start_mark)
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


# YAML 1.2, section 10.3.2 (core schema), without octal and hexadecimal. PyYAML would read 010 as
# octal.
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


# Typed objects as YAML that every reader takes for the same data: block style, fixed order, text
# quoted unless plain.
#
# PyYAML writes `1e3`, `0o17` and `1_000` unquoted, which are numbers to YAML 1.2 readers as
# Kubernetes and Compose have them, and `y` and `12:30`, which are not text to 1.1's. Here only
# what looks like nothing else goes unquoted; whatever is not printable ASCII is escaped. So no
# value can become a key, a comment or a document of its own.

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that indents lists, never writes aliases, and quotes what is not plain."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def dump_yaml(documents: Sequence[BaseModel | Mapping[str, object]], comment: str = "") -> str:
    """The documents, one after the other; `comment` goes before them, each of its lines behind a
    `#`.

    Models are written under their aliases, without what is None. The same objects give the same
    text.
    """
    content = [
        one.model_dump(by_alias=True, exclude_none=True) if isinstance(one, BaseModel) else one
        for one in documents
    ]
    body = yaml.dump_all(
        content,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=False,
        width=1 << 20,
        explicit_start=len(content) > 1,
    )
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body
