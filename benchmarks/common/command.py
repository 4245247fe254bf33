"""The command line that all benchmarks share: `--help` shows the module's docstring."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that shows `description` as it is written, under the name `python -m MODULE`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return argparse.ArgumentParser(
        prog=f"python -m {spec.name}" if spec else None,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_markdown(parser: argparse.ArgumentParser) -> None:
    """Add `--markdown FILE`: the benchmark replaces its section in that file."""
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="replace this file's section with the table"
    )


def read_words(description: str | None, *names: str) -> list[str]:
    """The values of positional arguments, in the order of `names`."""
    parser = make_parser(description)
    for name in names:
        parser.add_argument(name)
    given = vars(parser.parse_args())
    return [given[name] for name in names]
