"""Tables of facts, which ship as YAML beside the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # a PyYAML without libyaml, which is slower
    from yaml import SafeLoader as Loader  # type: ignore[assignment]

FOLDER = Path(__file__).with_name("data")


def read_table(name: str) -> list[dict[str, Any]]:
    """Return the rows of data/NAME.yaml."""
    rows: list[dict[str, Any]] = Loader((FOLDER / f"{name}.yaml").read_bytes()).get_single_data()
    return rows
