"""The versions of vLLM that our scheduler was tried with: what it subclasses is not public and changes."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from toolkit.errors import InputError

TRIED = "==0.32.*"


def check_version(version: str) -> None:
    """`InputError`, naming the range and how to get there, for a version that was not tried."""
    try:
        tried = Version(version) in SpecifierSet(TRIED, prereleases=True)
    except InvalidVersion:
        tried = False
    if not tried:
        raise InputError(
            f"vLLM is {version}; our scheduler was tried inside vLLM {TRIED}",
            f"pip install 'vllm{TRIED}', or leave out --scheduler-cls",
        )
