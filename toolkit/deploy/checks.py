"""The result of one check of `llmctl doctor`, and texts that its checks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and what to do where something is missing.

    `note` is worth knowing and stops nobody; `missing` must be there before the recipe can be used here.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


def gib(value: float) -> str:
    """Bytes in the binary unit that suits them, GiB at most."""
    if value >= GIB:
        return f"{value / GIB:,.1f} GiB"
    return f"{value / MIB:,.1f} MiB"
