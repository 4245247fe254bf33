"""How two plans differ, key by key. Who wrote them, and how they explain themselves, does not count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.files.plan import Plan

NOT_COMPARED = {"environment", "tool_version", "explained"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A key and its two values as text; '' where one side lacks it."""

    key: str
    old: str
    new: str


def differences(old: Plan, new: Plan) -> list[Difference]:
    """The keys at which two plans differ, in the file's order."""
    before, after = dict(_flat("", _content(old))), dict(_flat("", _content(new)))
    keys = dict.fromkeys([*before, *after])
    return [
        Difference(key, before.get(key, ""), after.get(key, "")) for key in keys if before.get(key) != after.get(key)
    ]


def _content(plan: Plan) -> dict[str, object]:
    return plan.model_dump(mode="json", exclude=NOT_COMPARED)


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", inner)
    else:
        yield prefix, "null" if value is None else str(value)
