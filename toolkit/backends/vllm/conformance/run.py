"""Compares the simulator with an installed vLLM: reads its files, runs its schedulers, counts."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import toolkit
from toolkit.backends.vllm.conformance.kinds import ModelKind, kinds
from toolkit.backends.vllm.conformance.results import ComparedKind, Conformance
from toolkit.backends.vllm.conformance.workloads import Case
from toolkit.backends.vllm.driver import prepare
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.backends.vllm.touched import Installed, Sources, check, read_vllm
from toolkit.catalogue.classes import DRAFTING, of_release
from toolkit.errors import EngineError
from toolkit.sim.drafts import keeps_known_outputs

CHILD = "toolkit.backends.vllm.conformance.child"
WORKLOADS = 40  # of each kind with each of the two schedulers
SEED = 1000
SCHEDULERS = {False: "Scheduler", True: "AsyncScheduler"}
LOAD_S = 1800.0
RETENTION = "0.29"  # the first release that has it in KVCacheConfig
CHECKPOINTS = "0.30"  # the first release that has their alignment, which the workloads set


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a child ran: the vLLM that it loaded, and for each workload its passes, or what else the
    child makes of it, or {"error": ...}.
    """

    version: str
    folder: Path
    results: list[Any]

    def passes(self) -> list[Any]:
        """The results. `EngineError` for a workload that ended with an error."""
        for number, one in enumerate(self.results):
            if isinstance(one, dict):
                raise EngineError(f"workload {number}: {one['error']}")
        return self.results


def compare(
    python: str, workloads: int = WORKLOADS, seed: int = SEED, only: Sequence[str] = ()
) -> Conformance:
    """Compare the simulator with the vLLM of a Python; `only`: names of kinds; none: all but
    those that are refused by name in this release.

    Raises `EngineError` where there is no vLLM, where it cannot be loaded, or where Python loads
    another than the one that was found.
    """
    start_s = time.monotonic()
    installed = read_vllm(python, f"name the Python that has it: --python, or {PYTHON_VARIABLE}")
    missing = check(installed)
    assert installed.folder is not None  # `check` has read it
    sources = Sources(installed.folder)
    lacks = {need for one in missing for need in one.item.needs}
    chosen = []
    refused: dict[str, str] = {}
    for kind in kinds():
        if kind.needs in lacks or not installed.has(kind.since):
            continue
        if kind.name in only:
            chosen.append(kind)
        elif not only:
            others = of_release(kind.classes, installed.version)
            if others:
                refused[kind.name] = ", ".join(one.what for one in others)
            else:
                chosen.append(kind)
    cases = [
        (kind, ahead, number, within(kind.make(number, ahead), installed))
        for kind in chosen
        for ahead in SCHEDULERS
        for number in range(seed, seed + (workloads if only else -(-workloads // kind.one_in)))
    ]
    loaded = Loaded(installed.version, installed.folder, [])
    if cases:
        loaded = run_cases(python, [case for *_, case in cases])
        installed.refuse_another(python, loaded.version, loaded.folder)
    rows = []
    for kind in chosen:
        for ahead, scheduler in SCHEDULERS.items():
            mine = [
                (number, {**case, "version": loaded.version}, theirs)
                for (one, is_ahead, number, case), theirs in zip(cases, loaded.results, strict=True)
                if one is kind and is_ahead == ahead
            ]
            rows.append(_row(kind, scheduler, mine))
    return Conformance(
        vllm=installed.version,
        tool_version=toolkit.__version__,
        date=datetime.now(UTC).date().isoformat(),
        seed=seed,
        seconds=round(time.monotonic() - start_s, 1),
        rows=rows,
        refused=refused,
        missing={one.item.words: one.why for one in missing},
        flags=sorted(sources.flags),
        metrics=sorted(sources.metrics),
    )


def within(case: Case, installed: Installed) -> Case:
    """The workload as a release serves it: it keeps every end of windows and states where it has no
    `retention`, makes no checkpoints inside a prefill before it has them, and keeps blocks of
    outputs with drafts by its own rule.
    """
    changed = dict(case)
    if not installed.has(RETENTION):
        changed["retention"] = None
    if "drafts" in case:
        later = keeps_known_outputs(installed.version)
        uses_states = DRAFTING[case["drafts"]["method"]]
        changed["keeps_known"] = later
        changed["hash_lookahead"] = int(later and uses_states)
    if "groups" in case and not installed.has(CHECKPOINTS):
        changed["groups"] = [
            {name: value for name, value in group.items() if name != "checkpoint"}
            for group in case["groups"]
        ]
    return changed


def run_cases(python: str, cases: Sequence[Case], child: str = CHILD) -> Loaded:
    """Run workloads through vLLM's own schedulers, in a process of its Python."""
    with tempfile.TemporaryDirectory(prefix="llmctl-vllm-") as name:
        folder = Path(name)
        model, environment = prepare(folder)
        given = folder / "cases.json"
        found = folder / "passes.json"
        given.write_text(json.dumps(list(cases)), encoding="utf-8")
        words = [python, "-m", child, str(given), str(found), model]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, env=environment, timeout=LOAD_S
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"vLLM's schedulers took longer than {LOAD_S:g} s") from None
        if done.returncode or not found.is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
            raise EngineError(f"vLLM could not be loaded: {lines[-1].strip()[-300:]}")
        content = json.loads(found.read_text(encoding="utf-8"))
    return Loaded(content["version"], Path(content["folder"]), content["results"])


def _row(kind: ModelKind, scheduler: str, ran: Sequence[tuple[int, Case, Any]]) -> ComparedKind:
    passes = differing = 0
    first = ""
    for number, case, theirs in ran:
        if isinstance(theirs, dict):
            differing += 1
            first = first or f"workload {number}: {theirs['error']}"
            continue
        passes += len(theirs)
        at = kind.differs(case, theirs)
        if at is not None:
            differing += 1
            first = first or f"workload {number}, pass {at}"
    return ComparedKind(
        kind=kind.name,
        classes=list(kind.classes),
        scheduler=scheduler,
        workloads=len(ran),
        differing=differing,
        passes=passes,
        cited=kind.cited,
        first=first,
    )
