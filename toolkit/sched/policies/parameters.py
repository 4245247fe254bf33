"""Parameters of policies and routers: dataclass fields with bounds, meaning and search range.

`@policy("name")` makes a class a policy, `parameter` and `choice` declare its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

from toolkit.errors import InputError, nearest

Value = bool | int | float | str
LARGEST_WHOLE = 2**53  # floats represent no larger integers exactly
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def policy(name: str = "", *, knows_lengths: bool = False) -> Callable[[type[T]], type[T]]:
    """Make a class a policy: its instances are frozen, and its fields are its parameters.

    `name` is what recipes and commands call it; the base of several policies has none.
    `knows_lengths`: whether it needs the true output lengths, which only a simulation has.
    """

    def frozen(plain: type[T]) -> type[T]:
        made = dataclass(frozen=True, slots=True)(plain)
        if name:
            made.name = name  # type: ignore[attr-defined]
            made.knows_lengths = knows_lengths  # type: ignore[attr-defined]
        return made

    return frozen


@dataclass(slots=True, frozen=True)
class Parameter:
    """A parameter's limits (inclusive), its search range if any, and its meaning with the unit."""

    low: float
    high: float
    search: tuple[float, float] | None
    log: bool
    doc: str
    choices: tuple[str, ...] = ()  # the allowed words, if the parameter is a word


def parameter(
    default: float,
    *,
    doc: str,
    low: float = 0,
    high: float = math.inf,
    search: tuple[float, float] | None = None,
    log: bool = False,
) -> Any:  # like dataclasses.field, so that the field keeps its type
    """A numeric (or boolean) parameter. `search` is the range that `llmctl tune` explores."""
    return field(default=default, metadata={"parameter": Parameter(low, high, search, log, doc)})


def choice(default: str, choices: Iterable[str], *, doc: str) -> Any:
    """A parameter that is one of a few words."""
    return field(
        default=default, metadata={"parameter": Parameter(0, 0, None, False, doc, tuple(choices))}
    )


def declared(kind: Any) -> dict[str, Parameter]:
    """The parameters of a class of policies or routers by name."""
    return {f.name: f.metadata["parameter"] for f in fields(kind) if "parameter" in f.metadata}


def defaults(kind: Any) -> dict[str, Value]:
    """The defaults of a class's parameters by name."""
    standard: dict[str, Any] = {f.name: f.default for f in fields(kind)}
    return {name: standard[name] for name in declared(kind)}


def parameters(policy: Any) -> dict[str, Value]:
    """The parameters of one policy or router."""
    return {name: getattr(policy, name) for name in declared(policy)}


def validate(settings: Any, owner: str = "") -> None:
    """For `__post_init__`: `InputError` unless each parameter has its type and keeps its limits.

    `owner` names in words what has the parameters; empty: a policy.
    """
    standard = defaults(settings)
    for name, limits in declared(settings).items():
        kind = type(standard[name])
        check(owner or f"policy '{settings.name}'", name, kind, getattr(settings, name), limits)


def refuse_unknown(owner: str, kind: Any, given: Iterable[str]) -> None:
    """Raise InputError, naming `owner`, for a parameter that the class `kind` lacks."""
    known = declared(kind)
    for name in given:
        if name not in known:
            hint = nearest(name, known) if known else "it has no parameters"
            raise InputError(f"{owner} has no parameter '{name}'", hint)


def make_one(what: str, known: Mapping[str, type[T]], name: str, given: Mapping[str, Value]) -> T:
    """Return the one of the `known` classes with this name, with `given` over its defaults. Raises
    InputError, calling it `what`, for an unknown name or parameter, and for a value beyond limits.
    """
    if name not in known:
        raise InputError(f"there is no {what} '{name}'", nearest(name, known))
    refuse_unknown(f"{what} '{name}'", known[name], given)
    return known[name](**given)


def split(word: str, example: str) -> tuple[str, str]:
    """Key and value of a `KEY=VALUE` word; `InputError` for any other word."""
    key, found, text = word.partition("=")
    if not found or not key:
        raise InputError(f"'{word}' is not KEY=VALUE", f"for example {example}")
    return key, text


def value(text: str) -> Value:
    """The text as an integer, a float, true or false; otherwise the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def from_words(words: Iterable[str]) -> dict[str, Value]:
    """`KEY=VALUE` words as parameters; `InputError` for any other word."""
    return {key: value(text) for key, text in (split(word, "slice_tokens=64") for word in words)}


def _is_finite(value: Any) -> bool:
    """Whether a client's value is a finite number: it may be a list or nothing, too, or an integer
    beyond any float.
    """
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def check(owner: str, name: str, kind: type, value: Value, limits: Parameter) -> None:
    """`InputError`, naming `owner`, if a value has the wrong type or is not within its limits."""
    where = f"{owner}: {name} is {repr(value)[:80]}"
    if limits.choices:
        if value not in limits.choices:
            raise InputError(f"{where}; it is one of {', '.join(limits.choices)}", limits.doc)
        return
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(f"{where}; it is true or false", limits.doc)
        return
    if isinstance(value, (bool, str)) or not _is_finite(value):
        raise InputError(f"{where}; it is a number", limits.doc)
    if kind is int and not isinstance(value, int):
        raise InputError(f"{where}; it is a whole number", limits.doc)
    high = min(limits.high, LARGEST_WHOLE) if kind is int else limits.high
    if not limits.low <= value <= high:
        endless = limits.high == math.inf and value < limits.low
        limit = f"at least {limits.low:g}" if endless else f"from {limits.low:g} to {high:g}"
        raise InputError(f"{where}; the limit is {limit}", limits.doc)
