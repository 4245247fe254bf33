"""Releases of vLLM, many of which have rules of their own."""

from __future__ import annotations

import re
from typing import TypeAlias

Release: TypeAlias = tuple[int, int]  # major and minor number


def release_of(version: str) -> Release | None:
    """The release of a version such as '0.33.0' or '0.33.1.dev2+cpu'; None: it is not known."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def named(release: Release) -> str:
    """As vLLM writes it, such as '0.33'."""
    return ".".join(map(str, release))
