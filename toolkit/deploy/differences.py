"""The comparison of two plans, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.files.plan import Plan

NOT_COMPARED = {"environment", "tool_version", "explained"}  # keys that `differences` ignores


@dataclass(frozen=True, slots=True)
class Difference:
    """A key and its two values as text; '' where one side lacks it."""

    key: str
    old: str
    new: str


def differences(old: Plan, new: Plan) -> list[Difference]:
    """The keys with values that differ between two plans, in the file's order.

    The versions and machines that wrote them, and their explanations, are not compared.
    """
    before, after = (
        dict(_flat("", plan.model_dump(mode="json", exclude=NOT_COMPARED))) for plan in (old, new)
    )
    keys = dict.fromkeys([*before, *after])
    return [
        Difference(key, before.get(key, ""), after.get(key, ""))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    """The leaves of nested data, with their paths as keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", inner)
    else:
        yield prefix, "null" if value is None else str(value)
