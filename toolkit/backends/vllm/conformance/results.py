"""What `llmctl vllm-check` found, kept by version of vLLM and cited in verdicts.

Results of this machine are in XDG's folder for data; the results of tried releases ship with
llmctl. A result of another version of llmctl's simulator is not cited.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from packaging.version import Version
from pydantic import Field

import toolkit
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.files.strict import Strict, read_bytes, validate

SHIPPED = Path(__file__).parent / "results"


class ComparedKind(Strict):
    """A kind of cache with one of vLLM's two schedulers."""

    kind: str
    classes: list[str] = Field(description="of models; empty: full attention")
    scheduler: str = Field(description="vLLM's class: Scheduler or AsyncScheduler")
    workloads: int
    differing: int = Field(description="workloads with a pass that differs")
    passes: int
    cited: bool = Field(description="it counts in verdicts about models of these classes")
    first: str = Field("", description="the first difference: workload and pass, or an error")


class Conformance(Strict):
    """A comparison of the simulator with one version of vLLM."""

    vllm: str
    tool_version: str
    date: str = Field(description="YYYY-MM-DD")
    seconds: float
    rows: list[ComparedKind]
    refused: dict[str, str] = Field(
        {},
        description="kinds that this release schedules by other rules, so that their models are "
        "refused by name, and why",
    )
    missing: dict[str, str] = Field(description="what llmctl touches and it lacks, and why")
    flags: list[str] = Field(description="all that its command line declares")
    metrics: list[str] = Field(description="all that it exports")

    @property
    def passes(self) -> int:
        """All that were compared."""
        return sum(row.passes for row in self.rows)

    @property
    def agrees(self) -> bool:
        """Whether nothing is missing and no workload differs."""
        return not self.missing and not any(row.differing for row in self.rows)

    def of(self, classes: Iterable[str]) -> list[ComparedKind]:
        """The rows of models of these classes, and of no others; of none: of full attention. Empty
        where a class was not compared.
        """
        wanted = set(classes)
        rows = [row for row in self.rows if row.cited and set(row.classes) <= wanted]
        if wanted:
            rows = [row for row in rows if row.classes]
        return rows if {one for row in rows for one in row.classes} == wanted else []


def own_folder() -> Path:
    """The folder of this machine's results."""
    base = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "llmctl" / "vllm"


def keep(found: Conformance) -> Path:
    """Write a result of this machine; returns its file."""
    folder = own_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.vllm}.json"
    write_file(found, path)
    return path


def result_of(version: str) -> Conformance | None:
    """Return the result for a version of vLLM: of this machine, else the shipped one."""
    release = version.partition("+")[0]
    for folder in (own_folder(), SHIPPED):
        path = folder / f"{release}.json"
        if path.is_file():
            try:
                found = read_result(path)
            except InputError:  # of another version of llmctl
                continue
            if found.tool_version == toolkit.__version__:
                return found
    return None


def read_result(path: Path) -> Conformance:
    """A result. `InputError` for another file."""
    return validate(Conformance, read_bytes(path), path, "llmctl vllm-check makes it")


def shipped_results() -> list[Conformance]:
    """The results that ship, oldest version first."""
    found = [read_result(path) for path in SHIPPED.glob("*.json")]
    return sorted(found, key=lambda one: Version(one.vllm))


def last_compared() -> str:
    """The newest version with a result that ships; '' where there is none."""
    shipped = shipped_results()
    return shipped[-1].vllm if shipped else ""


def agreement(version: str, classes: Iterable[str] = ()) -> str:
    """How far the simulator agrees with a version of vLLM on models of these classes, in words for
    a verdict.
    """
    found = result_of(version)
    rows = found.of(classes) if found else []
    if not rows:
        return f"the simulator was not compared with vLLM {version}: llmctl vllm-check does it"
    differing = sum(row.differing for row in rows)
    passes = sum(row.passes for row in rows)
    if differing:
        workloads = sum(row.workloads for row in rows)
        return (
            f"the simulator differs from vLLM {version} in {differing} of {workloads} workloads "
            "(llmctl vllm-check)"
        )
    return f"the simulator agrees with vLLM {version} in {passes:,} passes"
