"""How vLLM's server is started for a recipe: the Python that has it, its command line, its environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import toolkit
from toolkit.endpoints.vllm_versions import TRIED, check_version
from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe
from toolkit.files.vllm import VllmSpec

PYTHON = "LLMCTL_VLLM_PYTHON"
MIB = 1 << 20
ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
PATIENCE_S = 60.0
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(slots=True, frozen=True)
class VllmCommand:
    """A server to start. `model` is a folder or a hub id, `flags` are the scheduler's, as vLLM spells them."""

    recipe: Recipe
    model: str
    served_model: str
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, host: str, port: int) -> list[str]:
        """The command, the Python first."""
        spec, model, engine = self._spec, self.recipe.model, self.recipe.engine
        words = [vllm_python(self.recipe), "-m", "toolkit.inside.vllm_serve", self.model]
        words += ["--host", host, "--port", str(port), "--served-model-name", self.served_model]
        words += ["--dtype", model.dtype, "--max-model-len", str(model.max_model_len)]
        if model.source != "random":
            words += ["--load-format", model.load_format]
        if model.revision:
            words += ["--revision", model.revision]
        if model.trust_remote_code:
            words += ["--trust-remote-code"]
        if engine.kv_cache_memory_mib is not None:
            words += ["--kv-cache-memory-bytes", str(int(engine.kv_cache_memory_mib * MIB))]
        elif self.recipe.hardware.device != "cpu":
            words += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
        if spec.block_size is not None:
            words += ["--block-size", str(spec.block_size)]
        if spec.num_gpu_blocks_override is not None:
            words += ["--num-gpu-blocks-override", str(spec.num_gpu_blocks_override)]
        if engine.tensor_parallel_size > 1:
            words += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
        if spec.enforce_eager:
            words += ["--enforce-eager"]
        return [*words, *spec.args, *self.flags]

    def environment(self, modules: Path) -> dict[str, str]:
        """The child's. `modules` is a folder that has llmctl's package and nothing else."""
        environment = os.environ | QUIET | {"PYTHONPATH": str(modules)} | dict(self.variables)
        if cpus := self.cpus[0]:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}
        if Path(self.model).is_dir():
            environment |= {"HF_HUB_OFFLINE": "1"}
        return environment

    @property
    def cpus(self) -> tuple[list[int], list[int]]:
        """The CPUs of the engine's threads, and those that are left for the rest of the server.

        Both empty where vLLM is not on a CPU, or nothing was said of threads: then it divides them itself.
        """
        threads = self.recipe.engine.threads
        if self.recipe.hardware.device != "cpu" or threads is None:
            return [], []
        there = sorted(os.sched_getaffinity(0))
        return there[:threads], there[threads:]

    @property
    def _spec(self) -> VllmSpec:
        return self.recipe.engine.vllm or VllmSpec()


def vllm_python(recipe: Recipe) -> str:
    """The Python of vLLM's environment, which seldom is ours: it wants another transformers."""
    spec = recipe.engine.vllm
    return (spec.python if spec else None) or os.environ.get(PYTHON) or sys.executable


def vllm_version(recipe: Recipe) -> str:
    """The version of vLLM there. `EngineError` where there is none, `InputError` where it was not tried."""
    python = vllm_python(recipe)
    remedy = f"pip install 'vllm{TRIED}' into it, or name another: engine.vllm.python in the recipe, or {PYTHON}"
    try:
        found = subprocess.run([python, "-c", ASK_VERSION], capture_output=True, text=True, timeout=PATIENCE_S)
    except OSError as error:
        raise EngineError(f"{python}: cannot be run: {error.strerror}", remedy) from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{python} did not answer within {PATIENCE_S:g} s", remedy) from None
    if found.returncode:
        raise EngineError(f"{python} has no vLLM", remedy)
    version = found.stdout.strip()
    check_version(version, f"or name another Python: engine.vllm.python in the recipe, or {PYTHON}")
    return version


def link_package(folder: Path) -> None:
    """Put llmctl's package into `folder`, alone: what else lies beside it, vLLM's environment has itself."""
    (folder / "toolkit").symlink_to(Path(toolkit.__file__).parent, target_is_directory=True)
