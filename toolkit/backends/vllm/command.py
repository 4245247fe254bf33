"""vLLM's own server as a child process: the version check, the command line, and its life.

`VllmCommand` says how the server is started for a recipe. `vllm_server` starts it, waits until it
answers, and ends it in order, so that no process of it is left behind. `flags_of` writes the
parameters of policy `vllm` as vLLM's own flags.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mypy_extensions
import psutil

import toolkit
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.backends.vllm.touched import (
    REQUIREMENT,
    Installed,
    read_vllm,
    refuse_missing,
    version_in,
)
from toolkit.errors import EngineError, InputError
from toolkit.files.recipe import Recipe, VllmSpec
from toolkit.processes.child import Child
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, parameters
from toolkit.sched.policies.vllm import FLAGS
from toolkit.units import MIB

NO_TELEMETRY = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(slots=True, frozen=True)
class VllmCommand:
    """A server to start.

    `model` is a folder or a hub id, `flags` are the scheduler's, as vLLM spells them. `variables`
    are added to its environment. `own_cpus` are the CPUs of its threads, by their positions among
    this machine's (none: the first), and `used_cpus` the CPUs of all servers here (none: its own).
    """

    recipe: Recipe
    model: str
    served_model: str
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    own_cpus: Sequence[int] = ()
    used_cpus: Sequence[int] = ()

    def words(self, host: str, port: int) -> list[str]:
        """The command line, beginning with the Python."""
        words = [vllm_python(self.recipe), "-m", "toolkit.backends.vllm.child", self.model]
        words += ["--host", host, "--port", str(port)]
        words += [word for flag, _ in self.settings() for word in flag]
        return [*words, *self.flags]

    def settings(self) -> list[tuple[list[str], str]]:
        """The flags about the model and the engine, each with its key of the recipe."""
        spec = self._spec
        model = self.recipe.model
        engine = self.recipe.engine
        budget = engine.kv_cache_memory_mib
        on_cpu = self.recipe.hardware.device == "cpu"
        load_format = None if model.source == "random" else model.load_format
        size = None if budget is None else int(budget * MIB)
        share = engine.gpu_memory_utilization if budget is None and not on_cpu else None
        gpus = engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None
        blocks = spec.num_gpu_blocks_override
        values: list[tuple[str, str, object]] = [  # None or False: without the flag
            ("serve.served_model_name, or the model", "--served-model-name", self.served_model),
            ("model.dtype", "--dtype", model.dtype),
            ("model.quantization", "--quantization", model.quantization),
            ("model.max_model_len", "--max-model-len", model.max_model_len),
            ("model.load_format", "--load-format", load_format),
            ("model.revision", "--revision", model.revision or None),
            ("model.trust_remote_code", "--trust-remote-code", model.trust_remote_code),
            ("engine.kv_cache_memory_mib", "--kv-cache-memory-bytes", size),
            ("engine.gpu_memory_utilization", "--gpu-memory-utilization", share),
            ("engine.vllm.block_size", "--block-size", spec.block_size),
            ("engine.vllm.kv_cache_dtype", "--kv-cache-dtype", spec.kv_cache_dtype),
            ("engine.vllm.num_gpu_blocks_override", "--num-gpu-blocks-override", blocks),
            ("engine.tensor_parallel_size", "--tensor-parallel-size", gpus),
            ("engine.vllm.enforce_eager", "--enforce-eager", spec.enforce_eager),
        ]
        settings = [
            ([flag] if value is True else [flag, str(value)], source)
            for source, flag, value in values
            if value is not None and value is not False
        ]
        return [*settings, *([(list(spec.args), "engine.vllm.args")] if spec.args else [])]

    def environment(self, modules: Path) -> dict[str, str]:
        """The child's environment. `modules` is a folder of nothing but llmctl's package."""
        own = {**self._spec.env, "PYTHONPATH": str(modules), **self.variables}
        environment = os.environ | NO_TELEMETRY | own
        if cpus := self.cpus[0]:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}
        return environment | ({"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {})

    @property
    def cpus(self) -> tuple[list[int], list[int]]:
        """The CPUs of the engine's threads, and those for the rest of the server. Both are empty
        where vLLM divides them: on a GPU, or if the recipe sets no threads.
        """
        threads = self.recipe.engine.threads
        if self.recipe.hardware.device != "cpu" or threads is None:
            return [], []
        own = self.own_cpus or range(threads)
        used = self.used_cpus or own
        available = list(enumerate(sorted(os.sched_getaffinity(0))))
        others = [cpu for position, cpu in available if position not in used]
        return [cpu for position, cpu in available if position in own], others

    @property
    def python_variable(self) -> str:
        """The variable that names vLLM's Python; '' where the recipe names it."""
        return "" if self._spec.python else PYTHON_VARIABLE

    @property
    def _spec(self) -> VllmSpec:
        return self.recipe.engine.vllm or VllmSpec()


def vllm_python(recipe: Recipe) -> str:
    """The Python of vLLM's environment: seldom llmctl's, since vLLM needs other transformers."""
    spec = recipe.engine.vllm
    return (spec.python if spec else None) or os.environ.get(PYTHON_VARIABLE) or sys.executable


def vllm_version(recipe: Recipe) -> str:
    """The version of vLLM in that Python. `EngineError` without any, `InputError` for a version
    that cannot be started and measured.
    """
    python = vllm_python(recipe)
    other = f"name another Python: engine.vllm.python in the recipe, or {PYTHON_VARIABLE}"
    installed = read_vllm(python, f"pip install '{REQUIREMENT}' into it, or {other}")
    refuse_missing(installed, "start")
    return installed.version


def vllm_beside(python: Path) -> Installed | None:
    """vLLM in the environment of a Python, by its files alone; None without any."""
    places = sorted(python.parent.parent.glob("lib*/python3*/*-packages"))
    for place in places:
        named = (*place.glob("vllm-*.dist-info"), *place.glob("vllm_cpu-*.dist-info"))
        distributions = sorted(each.name.removesuffix(".dist-info") for each in named)
        folder = place / "vllm"
        package = folder if folder.is_dir() else None
        if distributions or package:
            last = distributions[-1] if distributions else ""
            version = version_in(package) or last.rpartition("-")[2].partition("+")[0]
            return Installed(version, package)
    return None


def link_package(folder: Path) -> None:
    """Link llmctl's package into `folder`, and `mypy_extensions`, a file without imports: all else
    that this code imports is in vLLM's environment, in versions of its own.
    """
    (folder / "toolkit").symlink_to(Path(toolkit.__file__).parent, target_is_directory=True)
    (folder / "mypy_extensions.py").symlink_to(mypy_extensions.__file__)


LOAD_S = 1800.0  # a large model from a slow disk, and its compilation
POLL_READY_S = 0.25
STOP_S = 30.0  # from SIGTERM to SIGKILL
STOP_LOADING_S = 5.0  # while it loads, and for processes that it leaves behind
HEALTH_TIMEOUT_S = 5.0


class VllmServer(Child):
    """A running server. Unless `quiet`, all that it prints is shown.

    Ctrl-C is for llmctl, which ends it in order. Its input ends with llmctl, and then its watcher
    ends the whole group (`toolkit.backends.vllm.child`).
    """

    vague = (*Child.vague, "Engine core initialization failed")

    def __init__(
        self, command: VllmCommand, host: str, port: int, *, quiet: bool, folder: Path
    ) -> None:
        self.url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        self._ready = False
        self._engine_cpus, self._other_cpus = command.cpus
        link_package(folder)
        words = command.words(host, port)
        super().__init__(words, command.environment(folder), folder, shows=not quiet)

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises `EngineError` with its own error line if it ends before, or
        takes longer than `LOAD_S`.
        """
        deadline_s = time.monotonic() + LOAD_S
        while not self.healthy():
            if not self.running:
                raise self.died("while it loaded")
            if time.monotonic() > deadline_s:
                raise EngineError(f"vLLM was not ready within {LOAD_S:g} s: {self.last_words()}")
            time.sleep(POLL_READY_S)
        self._ready = True
        self._keep_engine_cpus_free()

    def healthy(self) -> bool:
        """Whether /health answers 200 now."""
        # Here: code inside vLLM imports this module, and does not need aiohttp.
        from toolkit.endpoints.ask import ask

        try:
            return ask(f"{self.url}/health", timeout_s=HEALTH_TIMEOUT_S)[0] == 200
        except InputError:
            return False

    def died(self, when: str) -> EngineError:
        """The error that says how it ended."""
        return EngineError(f"vLLM ended {when} ({self.ended_by()})", "its own output says more")

    def stop(self) -> None:
        """End it, by force if necessary, with every process of its group. While it loads it waits
        for its engine and ignores signals (vLLM 0.32).
        """
        self.terminate()
        self.end(STOP_S if self._ready else STOP_LOADING_S, rest_s=STOP_LOADING_S)

    def _keep_engine_cpus_free(self) -> None:
        """Move all processes but the engine off the CPUs that the engine's threads are bound to.

        vLLM's API server and its scheduler, which busy-waits, would at times run there and slow
        passes by about a tenth. New threads inherit the CPUs of the thread that starts them. Call
        this only once the engine's threads are bound.
        """
        if not self._other_cpus:
            return
        server = psutil.Process(self.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.cpu_affinity() == self._engine_cpus:
                    continue
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, self._other_cpus)


@contextlib.contextmanager
def vllm_server(
    command: VllmCommand, host: str = "127.0.0.1", port: int = 0, *, quiet: bool
) -> Iterator[VllmServer]:
    """Yield a server that answers, and end it afterwards. Port 0 means a free port. Raises
    `InputError` for a version that lacks what is needed, and `EngineError` if vLLM is absent or
    does not load.
    """
    vllm_version(command.recipe)
    with tempfile.TemporaryDirectory(prefix="llmctl-vllm-") as name:
        server = VllmServer(command, host, port or free_port(host), quiet=quiet, folder=Path(name))
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def free_port(host: str) -> int:
    """A port that is free at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


POLICY = "vllm"
DRAFTS = "num_speculative_tokens"
SWITCHES = {"chunked_prefill": "enable-chunked-prefill", "prefix_caching": "enable-prefix-caching"}


def draft_flags(recipe: Recipe, given: Mapping[str, Value], rates: Sequence[float]) -> list[str]:
    """The flags of speculative decoding with the policy's parameters `given`; none without drafts.

    With `rates` vLLM accepts drafts at these rates, of each position, whatever they are. Raises
    `InputError` where the recipe does not say how drafts are made.
    """
    tokens = int(given.get(DRAFTS, 0))
    if not tokens:
        return []
    spec = recipe.engine.vllm.drafts if recipe.engine.vllm else None
    if spec is None:
        raise InputError(
            f"{DRAFTS} is {tokens}, and recipe '{recipe.name}' does not say how drafts are made",
            "set engine.vllm.drafts, such as method: ngram",
        )
    config: dict[str, object] = {"method": spec.method, DRAFTS: tokens}
    if spec.model is not None:
        config["model"] = spec.model
    if rates and recipe.hardware.device == "cpu":
        raise InputError(
            "serve.acceptance.synthetic: vLLM accepts no drafts by made-up rates on a CPU",
            "leave it out: there it accepts what the model accepts",
        )
    if rates:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    return ["--speculative-config", json.dumps(config | spec.options)]


def flags_of(
    policy: str, given: Mapping[str, Value], *, prefix_caching: bool | None = None
) -> list[str]:
    """All parameters of policy `vllm` as flags; none for other policies, which run inside vLLM.

    `prefix_caching`, if given, overrides the parameter of that name. Raises `InputError` for an
    unknown parameter.
    """
    values = parameters(make_any(policy, given)) if policy == POLICY else {}
    values.pop(DRAFTS, None)  # `draft_flags` has it
    if prefix_caching is not None:
        values["prefix_caching"] = prefix_caching
    words: list[str] = []
    for name, value in values.items():
        if name in FLAGS and value == FLAGS[name].off:
            continue
        if isinstance(value, bool):
            words.append(f"--{SWITCHES[name]}" if value else f"--no-{SWITCHES[name]}")
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def grouped(words: Sequence[str]) -> list[list[str]]:
    """Return the words of a command line flag by flag, each with its value."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups
