"""The versions of vLLM that were tried: what our classes inside it subclass is not public, and its flags change."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from toolkit.errors import InputError

TRIED = "==0.32.*"


def check_version(version: str, remedy: str = "or leave out --scheduler-cls") -> None:
    """`InputError`, naming the range and how to get there, for a version that was not tried."""
    try:
        tried = Version(version) in SpecifierSet(TRIED, prereleases=True)
    except InvalidVersion:
        tried = False
    if not tried:
        raise InputError(
            f"vLLM is {version}; llmctl was tried with vLLM {TRIED}", f"pip install 'vllm{TRIED}', {remedy}"
        )
