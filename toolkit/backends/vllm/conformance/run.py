"""Compares the simulator with an installed vLLM: reads its files, runs its schedulers, counts."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import toolkit
from toolkit.backends.vllm.command import link_package
from toolkit.backends.vllm.conformance.cases import Case
from toolkit.backends.vllm.conformance.kinds import KINDS, ModelKind
from toolkit.backends.vllm.conformance.modelled import differs, drafts_of_case
from toolkit.backends.vllm.conformance.results import ComparedKind, Conformance
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.backends.vllm.touched import Installed, Sources, check, read_vllm
from toolkit.catalogue.classes import DRAFTING, of_release
from toolkit.errors import EngineError
from toolkit.processes.child import Child

CHILD = "toolkit.backends.vllm.conformance.driven"
SCHEDULERS = {False: "Scheduler", True: "AsyncScheduler"}
LOAD_S = 1800.0
RETENTION = "0.29"  # the first release that has it in KVCacheConfig
HASH_LOOKAHEAD = "0.33"  # the first release in which a block's key covers tokens behind it
CHECKPOINTS = "0.30"  # the first release that has their alignment, which the workloads set
# A model that vLLM knows without any code of its own; only its config is read.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a child ran: the vLLM that it loaded, and for each workload its passes, or what else the
    child makes of it, or {"error": ...}.
    """

    version: str
    folder: Path
    results: list[Any]

    def passes(self) -> list[Any]:
        """Return the results. Raises `EngineError` if a workload ended with an error."""
        for number, one in enumerate(self.results):
            if isinstance(one, dict):
                raise EngineError(f"workload {number}: {one['error']}")
        return self.results


def compare(python: str, cases: Sequence[Case]) -> Conformance:
    """Compare the simulator with the vLLM of a Python, on workloads of `kinds.KINDS`.

    Kinds that are refused by name in this release, or that it does not have, are left out. Raises
    `EngineError` where there is no vLLM, where it cannot be loaded, or where Python loads another
    vLLM than was found.
    """
    start_s = time.monotonic()
    installed = read_vllm(python, f"name the Python that has it: {PYTHON_VARIABLE}")
    missing = check(installed)
    assert installed.folder is not None  # `check` has read it
    sources = Sources(installed.folder)
    lacks = {need for one in missing for need in one.item.needs}
    refused: dict[str, str] = {}
    able = []
    for kind in KINDS:
        if kind.needs in lacks or not installed.has(kind.since):
            continue
        others = of_release(kind.classes, installed.version)
        if others:
            refused[kind.name] = ", ".join(one.what for one in others)
        else:
            able.append(kind)
    names = {kind.name for kind in able}
    wanted = [
        within(case, installed)
        for case in cases
        if case["kind"] in names and not of_release(_classes(case), installed.version)
    ]
    results: list[Any] = []
    if wanted:
        loaded = run_cases(python, wanted)
        installed.refuse_another(python, loaded.version, loaded.folder)
        results = loaded.results
    rows = []
    for kind in able:
        for ahead, scheduler in SCHEDULERS.items():
            pairs = [
                (case, theirs)
                for case, theirs in zip(wanted, results, strict=True)
                if (case["kind"], case["ahead"]) == (kind.name, ahead)
            ]
            if pairs:
                rows.append(_row(kind, scheduler, pairs))
    return Conformance(
        vllm=installed.version,
        tool_version=toolkit.__version__,
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(time.monotonic() - start_s, 1),
        rows=rows,
        refused=refused,
        missing={one.item.words: one.why for one in missing},
        flags=sorted(sources.flags),
        metrics=sorted(sources.metrics),
    )


def _classes(case: Case) -> list[str]:
    """Return the classes of a workload that not all releases schedule by the same rules."""
    has_states = any(group["kind"] == "state" for group in case.get("groups", ()))
    return ["states"] * has_states + ["drafts"] * ("drafts" in case)


def within(case: Case, installed: Installed) -> Case:
    """Return the workload as a release serves it: it keeps every end of windows and states where it
    has no `retention`, makes no checkpoints inside a prefill before it has them, and covers tokens
    behind a block with drafts by its own rule.
    """
    changed = dict(case, version=installed.version)
    if not installed.has(RETENTION):
        changed["retention"] = None
    if "drafts" in case:
        uses_states = DRAFTING[case["drafts"]["method"]]
        changed["hash_lookahead"] = int(uses_states and installed.has(HASH_LOOKAHEAD))
        changed["drafts"] = drafts_of_case(case)
    if "groups" in case and not installed.has(CHECKPOINTS):
        changed["groups"] = [
            {name: value for name, value in group.items() if name != "checkpoint"}
            for group in case["groups"]
        ]
    return changed


def prepare(folder: Path) -> tuple[str, dict[str, str]]:
    """Put into `folder` what a process of vLLM's Python needs. Returns the folder of a model, and
    an environment that has llmctl's package.
    """
    link_package(folder)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return str(model), os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_cases(python: str, cases: Sequence[Case], child: str = CHILD) -> Loaded:
    """Run workloads through vLLM's own schedulers, in a process of its Python."""
    with tempfile.TemporaryDirectory(prefix="llmctl-vllm-") as name:
        folder = Path(name)
        model, environment = prepare(folder)
        given = folder / "cases.json"
        found = folder / "passes.json"
        given.write_text(json.dumps(list(cases)), encoding="utf-8")
        words = [python, "-m", child, str(given), str(found), model]
        with Child(words, environment) as driver:
            code = driver.wait(LOAD_S)
        if code is None:
            raise EngineError(f"vLLM's schedulers took longer than {LOAD_S:g} s")
        if code or not found.is_file():
            raise EngineError(f"vLLM could not be loaded: {driver.last_words() or 'no output'}")
        content = json.loads(found.read_text(encoding="utf-8"))
    return Loaded(content["version"], Path(content["folder"]), content["results"])


def _row(kind: ModelKind, scheduler: str, pairs: Sequence[tuple[Case, Any]]) -> ComparedKind:
    """Compare workloads of one kind with the passes that one of vLLM's schedulers planned."""
    passes = differing = 0
    first = ""
    for case, theirs in pairs:
        if isinstance(theirs, dict):
            at = theirs["error"]
        else:
            passes += len(theirs)
            number = differs(case, theirs)
            if number is None:
                continue
            at = f"pass {number}"
        differing += 1
        first = first or f"workload {case['seed']}, {at}"
    return ComparedKind(
        kind=kind.name,
        classes=list(kind.classes),
        scheduler=scheduler,
        workloads=len(pairs),
        differing=differing,
        passes=passes,
        cited=kind.cited,
        first=first,
    )
