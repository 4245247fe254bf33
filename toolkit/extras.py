"""The distribution's name, and what an install without its extras lacks.

`llmctl` on the package index is another project. pyproject.toml lists the extras.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from toolkit.errors import EngineError

DISTRIBUTION = "llmctl-toolkit"


def install(extra: str) -> str:
    """The command that adds an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def absent(libraries: Iterable[str]) -> list[str]:
    """Those of `libraries` that are not installed. Nothing is imported."""
    return [name for name in libraries if find_spec(name) is None]


def require(libraries: Iterable[str], user: str, command: str) -> None:
    """Raise `EngineError` where `user` lacks one of `libraries`, which `command` installs."""
    if lacking := absent(libraries):
        verb = "is" if len(lacking) == 1 else "are"
        raise EngineError(
            f"{user} needs {' and '.join(lacking)}, which {verb} not installed", command
        )
