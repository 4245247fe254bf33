"""`llmctl vllm-check`: compare the installed vLLM with what llmctl knows of it."""

from __future__ import annotations

import os
import sys

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note, table
from toolkit.errors import TargetMissedError
from toolkit.report.parts import Cell


def command(as_json: JsonOption = False) -> None:
    """Compare the installed vLLM with what llmctl knows of it, without a GPU and without weights.

    LLMCTL_VLLM_PYTHON names the Python that has vLLM; without it llmctl's own is asked.

    First its files: every import, method, attribute, flag and metric that llmctl touches. Then its
    schedulers, which plan the workloads that ship beside the simulator's model of them, pass by
    pass. The result is kept by version, and verdicts of tune, capacity and simulate cite it. Kinds
    that the version schedules by other rules are refused by name everywhere, and not compared.
    Exits with 4 where something is missing or differs.
    """
    from toolkit.backends.vllm.conformance.cases import shipped_cases
    from toolkit.backends.vllm.conformance.results import keep
    from toolkit.backends.vllm.conformance.run import compare
    from toolkit.backends.vllm.setup import PYTHON_VARIABLE
    from toolkit.backends.vllm.touched import CAPABILITIES, TOUCHED

    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    found = compare(python, shipped_cases())
    kept = keep(found)

    def show() -> None:
        print(f"vLLM {found.vllm}: {len(TOUCHED) - len(found.missing)} of {len(TOUCHED)} items")
        for item, why in found.missing.items():
            print(f"  {item}: {why}")
        columns = ["kind", "vLLM's", ">workloads", ">differ", ">passes"]
        rows: list[list[Cell]] = [
            [row.kind, row.scheduler, row.workloads, row.differing, row.passes]
            for row in found.rows
        ]
        table(columns, rows)
        for row in found.rows:
            if row.first:
                print(f"{row.kind}, {row.scheduler}: {row.first}")
        for kind, why in found.refused.items():
            print(f"{kind}: not compared, since its models are refused by name: {why}")
        print(f"{found.passes:,} passes in {found.seconds:g} s")

    emit(as_json, found, show)
    note(f"wrote {kept}; tune, capacity and simulate cite it")
    if not found.agrees:
        what = [f"{item}: {why}" for item, why in found.missing.items()]
        what += [
            f"{row.kind}, {row.scheduler}: {row.differing} of {row.workloads} differ"
            for row in found.rows
            if row.differing
        ]
        lacking = {need for item in TOUCHED if item.words in found.missing for need in item.needs}
        needs = [need for need in CAPABILITIES if need in lacking] or ["simulation"]
        raise TargetMissedError(
            f"vLLM {found.vllm} is not as llmctl knows it: {what[0]}",
            CAPABILITIES[needs[0]].without,
        )
