"""What pydantic found wrong, in lines that a person can act on: the key's path, the value, what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel, ValidationError

from toolkit.errors import nearest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Location = Sequence[int | str]
MAX_LINES = 3


def problems(error: ValidationError, model: type[BaseModel], data: object) -> list[str]:
    """One line per problem, the first three, and how many more there are. `data` is what was validated."""
    found = error.errors(include_url=False)
    found.sort(key=lambda details: details["type"] != "extra_forbidden")  # a misspelt key explains a missing one
    lines: dict[str, str] = {}
    for details in found:
        where = _real_location(details, data)
        if details["type"] == "missing" and any(f"did you mean '{where[-1]}'" in line for line in lines.values()):
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
    text = details["msg"].replace("Input should be", "should be").replace("Keys should", "key should")
    return f"{path}: {_shown(details['input'])}: {text}" if path else text


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = "null" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _path(where: Location) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")


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
