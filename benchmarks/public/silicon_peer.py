"""AIConfigurator's own predictions of the rows of its systems/silicon_sample.csv.

    PYTHON benchmarks/public/silicon_peer.py --data AICONFIGURATOR --out FILE

PYTHON is that of an environment of its own with the package aiconfigurator; nothing of llmctl is
needed. Takes ten minutes. Each row of vLLM without disaggregation is estimated as the project's own
tools/accuracy_regression_testing/predict_silicon_sample.py does: with its defaults, by the tables
of the row's version of vLLM, and by those of its default version where there are none. Version
0.12 of the package needs AIC_ALLOW_UNLISTED_VERSIONS=1 for the former, which is set here. Two
models, since it would download their config.json, have the names under which it ships the same
sizes. A row that it refuses has its words instead of times.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

SAMPLE = "aic-core/src/aiconfigurator_core/systems/silicon_sample.csv"
RANKS = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
NO_TABLES = ("Failed to load perf database", "rows loaded", "version")
SHIPPED = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}


def estimate(row: dict[str, str]) -> tuple[float, float]:
    """TTFT and TPOT in milliseconds."""
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]

    arguments: dict[str, Any] = {
        "model_path": SHIPPED.get(row["model_path"], row["model_path"]),
        "system_name": row["system"],
        "mode": "agg",
        "backend_name": "vllm",
        "backend_version": row["backend_version"] or None,
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
        "gemm_quant_mode": row["gemm_quant_mode"] or None,
        "moe_quant_mode": row["moe_quant_mode"] or None,
    }
    arguments |= {name: int(row[name]) for name in ("batch_size", *RANKS) if row[name]}
    try:
        found = cli_estimate(**arguments)
    except Exception as error:
        known = any(words in str(error) for words in NO_TABLES)
        if arguments["backend_version"] is None or not known:
            raise
        found = cli_estimate(**(arguments | {"backend_version": None}))
    return float(found.ttft), float(found.tpot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    os.environ["AIC_ALLOW_UNLISTED_VERSIONS"] = "1"
    with (options.data / SAMPLE).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows = [row for row in rows if (row["backend"], row["mode"]) == ("vllm", "agg")]
    found: dict[str, Any] = {}
    known: dict[tuple[str, ...], Any] = {}
    for row in rows:
        keys = (*RANKS, "batch_size", "isl", "osl", "model_path", "system", "backend_version")
        key = tuple(row[name] for name in (*keys, "gemm_quant_mode", "moe_quant_mode"))
        if key not in known:
            try:
                with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                    known[key] = estimate(row)
            except Exception as error:  # noqa: BLE001 - whatever it says is the answer
                known[key] = f"{type(error).__name__}: {error}"
        found[row["id"]] = known[key]
    content = {"version": version("aiconfigurator"), "rows": found}
    options.out.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
