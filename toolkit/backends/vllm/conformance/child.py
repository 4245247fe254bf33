"""Runs workloads through vLLM's own schedulers, in vLLM's Python.

    VLLM-PYTHON -m toolkit.backends.vllm.conformance.child CASES.json PASSES.json MODEL-FOLDER

PASSES.json has the version and the folder of the vLLM that was loaded, and each workload's passes,
or the error that ended it. No GPU is used: vLLM is told that it is a build for CPUs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # nothing is computed, so a prompt may be longer than the model allows
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def as_cpu_build() -> None:
    """Let vLLM take the platform of a CPU, which it chooses by the version of its distribution: a
    build for GPUs finds none here, or must leave it alone.
    """
    version = importlib.metadata.version

    def answer(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return version(distribution_name)
        try:
            found = version("vllm")
        except importlib.metadata.PackageNotFoundError:
            found = version("vllm-cpu")
        return found if "cpu" in found else f"{found.partition('+')[0]}+cpu"

    importlib.metadata.version = answer


def look_at_models_here() -> None:
    """Let vLLM look at its model's class in this process, if it can: a process of its own would
    import all of vLLM again.
    """
    with contextlib.suppress(ImportError):
        from vllm.model_executor.models import registry

        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda look: look()


def main(run: Callable[[str, dict[str, Any]], Any]) -> None:
    """Run each workload by `run(model, case)`."""
    given, found, model = sys.argv[1:]
    os.environ |= ENVIRONMENT
    as_cpu_build()
    start_s = time.monotonic()
    import vllm

    look_at_models_here()
    results: list[Any] = []
    for case in json.loads(Path(given).read_text(encoding="utf-8")):
        try:
            results.append(run(model, case))
        except Exception as error:  # noqa: BLE001  (each workload has its own result)
            results.append({"error": f"{type(error).__name__}: {error}"})
    content = {
        "version": vllm.__version__.partition("+")[0],
        "folder": str(Path(vllm.__file__).parent),
        "seconds": time.monotonic() - start_s,
        "results": results,
    }
    Path(found).write_text(json.dumps(content), encoding="utf-8")


def _passes(model: str, case: dict[str, Any]) -> Any:
    from toolkit.backends.vllm.conformance.driven import Driven

    return Driven(model, case).run()


if __name__ == "__main__":
    main(_passes)
