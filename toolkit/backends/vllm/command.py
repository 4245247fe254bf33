"""vLLM's own server as a child: started, waited for, ended in order, and never left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import toolkit
from toolkit import guard
from toolkit.backends.vllm.child import END_S as CHILD_END_S
from toolkit.backends.vllm.child import SHUTDOWN
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.errors import EngineError, InputError
from toolkit.files.recipe import Recipe, VllmSpec
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, parameters

# The versions of vLLM that were tried: what our classes inside it subclass is not public, and its
# flags change.

TRIED = "==0.32.*"


def check_version(version: str, remedy: str = "or leave out --scheduler-cls") -> None:
    """`InputError`, naming the range and how to get there, for a version that was not tried."""
    try:
        tried = Version(version) in SpecifierSet(TRIED, prereleases=True)
    except InvalidVersion:
        tried = False
    if not tried:
        raise InputError(
            f"vLLM is {version}; llmctl was tried with vLLM {TRIED}",
            f"pip install 'vllm{TRIED}', {remedy}",
        )


# How vLLM's server is started for a recipe: the Python that has it, its command line, its
# environment.

MIB = 1 << 20
ASK_VERSION = "import importlib.metadata as m; print(m.version('vllm'))"
PATIENCE_S = 60.0
QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(slots=True, frozen=True)
class VllmCommand:
    """A server to start. `model` is a folder or a hub id, `flags` are the scheduler's, as vLLM
    spells them.
    """

    recipe: Recipe
    model: str
    served_model: str
    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def words(self, host: str, port: int) -> list[str]:
        """The command, the Python first."""
        spec, model, engine = self._spec, self.recipe.model, self.recipe.engine
        words = [vllm_python(self.recipe), "-m", "toolkit.backends.vllm.child", self.model]
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
    def end_s(self) -> float:
        """Seconds that a server whose llmctl has died takes at most, if it runs: see
        `toolkit.backends.vllm.child`.
        """
        words = list(self.flags)
        return CHILD_END_S + (float(words[words.index(SHUTDOWN) + 1]) if SHUTDOWN in words else 0.0)

    @property
    def cpus(self) -> tuple[list[int], list[int]]:
        """The CPUs of the engine's threads, and those that are left for the rest of the server.

        Both empty where vLLM is not on a CPU, or nothing was said of threads: then it divides them
        itself.
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
    return (spec.python if spec else None) or os.environ.get(PYTHON_VARIABLE) or sys.executable


def vllm_version(recipe: Recipe) -> str:
    """The version of vLLM there. `EngineError` where there is none, `InputError` where it was not
    tried.
    """
    python = vllm_python(recipe)
    remedy = f"pip install 'vllm{TRIED}' into it, or name another: engine.vllm.python in the recipe, or {PYTHON_VARIABLE}"
    try:
        found = subprocess.run(
            [python, "-c", ASK_VERSION], capture_output=True, text=True, timeout=PATIENCE_S
        )
    except OSError as error:
        raise EngineError(f"{python}: cannot be run: {error.strerror}", remedy) from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{python} did not answer within {PATIENCE_S:g} s", remedy) from None
    if found.returncode:
        raise EngineError(f"{python} has no vLLM", remedy)
    version = found.stdout.strip()
    check_version(
        version, f"or name another Python: engine.vllm.python in the recipe, or {PYTHON_VARIABLE}"
    )
    return version


def link_package(folder: Path) -> None:
    """Put llmctl's package into `folder`, alone: what else lies beside it, vLLM's environment has
    itself.
    """
    (folder / "toolkit").symlink_to(Path(toolkit.__file__).parent, target_is_directory=True)


LOAD_S = 1800.0  # a large model from a slow disk, and its compiling
LOOK_EVERY_S = 0.25
END_S = 30.0  # from SIGTERM to SIGKILL
REST_S = 5.0  # the same while it loads, and for processes that it leaves behind
LOOK_AGAIN_S = 0.02
GUARD_S = 2.0  # from the time by which it has killed itself to the guard's own look
TAIL_LINES = 40
UP_S = 5.0  # for an answer of /health


class VllmServer:
    """A server that runs. `url` is where; its standard error goes to ours, or is kept for when it
    dies.
    """

    def __init__(
        self, command: VllmCommand, host: str, port: int, *, quiet: bool, folder: Path
    ) -> None:
        self.url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        self._quiet, self._ready = quiet, False
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._engine_cpus, self._other_cpus = command.cpus
        link_package(folder)
        # Its session is its own: Ctrl-C is for us, and we end it in order. Its input ends with us,
        # which it notices itself where it still runs; the guard ends what is left of the session.
        self._child = subprocess.Popen(
            command.words(host, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=command.environment(folder),
            cwd=folder,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        try:
            guard.watch(self._child.pid, command.end_s + GUARD_S)
        except OSError:
            self._child.kill()
            self._child.wait()
            raise
        self._reader = threading.Thread(
            target=self._keep_output, args=(self._child.stdout,), daemon=True
        )
        self._reader.start()

    def wait_until_ready(self, limit_s: float = LOAD_S) -> None:
        """Until it answers. `EngineError` with its own words where it ends before, or takes longer."""
        deadline_s = time.monotonic() + limit_s
        while not self.healthy():
            if self._child.poll() is not None:
                raise self.died("while it loaded")
            if time.monotonic() > deadline_s:
                raise EngineError(f"vLLM was not ready within {limit_s:g} s: {self._last_words()}")
            time.sleep(LOOK_EVERY_S)
        self._ready = True
        self._keep_clear()

    def healthy(self) -> bool:
        """Whether /health says so now."""
        import httpx  # here: what runs inside vLLM imports this module and needs none

        try:
            return httpx.get(f"{self.url}/health", timeout=UP_S, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._child.poll() is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None where it has not ended within `timeout_s`."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def died(self, when: str) -> EngineError:
        """The error that says how it ended."""
        code = self._child.wait()
        self._reader.join(UP_S)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return EngineError(
            f"vLLM ended {when} ({how}): {self._last_words()}", "its own output says more"
        )

    def signal_end(self) -> None:
        """Ask it to end: it refuses new requests and drops those that run."""
        if self.running:
            self._child.terminate()

    def stop(self) -> None:
        """End it, by force where it does not, and whatever of it stays behind.

        While it loads it waits for its engine, and hears no signal (vLLM 0.32).
        """
        self.signal_end()
        if self.wait(END_S if self._ready else REST_S) is None:
            self._child.kill()
            self._child.wait()
        self._end_group()
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        self._reader.join(UP_S)

    def _end_group(self) -> None:
        """vLLM ends its engine in order; one that was killed leaves it behind."""
        group = self._child.pid
        deadline_s = time.monotonic() + REST_S
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(group, signal.SIGTERM)
            while time.monotonic() < deadline_s:
                time.sleep(LOOK_AGAIN_S)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-group, os.WNOHANG)  # process 1 of a container inherits them
                os.killpg(group, 0)
            os.killpg(group, signal.SIGKILL)
        guard.forget(group)

    def _keep_clear(self) -> None:
        """Move what is not the engine off the CPUs that its threads are bound to, now that they
        are.

        vLLM's API server and its scheduler's process, which waits busily, would run there at times:
        that costs passes a tenth of their speed, now more and now less. Threads that begin later
        are where those are that begin them.
        """
        if not self._other_cpus:
            return
        server = psutil.Process(self._child.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.cpu_affinity() == self._engine_cpus:
                    continue
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, self._other_cpus)

    def _keep_output(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._tail.append(line.rstrip())
                if not self._quiet:
                    print(line, end="", file=sys.stderr)

    def _last_words(self) -> str:
        """The last line that names an error, else the last one."""
        lines = [line for line in self._tail if line.strip()]
        named = [
            line
            for line in lines
            if "Error" in line and "Engine core initialization failed" not in line
        ]
        return (named or lines or ["it said nothing"])[-1].strip()[-300:]


@contextlib.contextmanager
def vllm_server(
    command: VllmCommand, host: str = "127.0.0.1", port: int = 0, *, quiet: bool
) -> Iterator[VllmServer]:
    """A server that answers; port 0: a free one. It is ended at the end of the block.

    Raises `InputError` for a version that was not tried, and `EngineError` where vLLM is not there or does not load.
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
    """A port that nobody has at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


# Parameters of policy `vllm` as vLLM's own flags.

POLICY = "vllm"
SWITCHES = {"chunked_prefill": "enable-chunked-prefill", "prefix_caching": "enable-prefix-caching"}


def flags_of(
    policy: str, given: Mapping[str, Value], *, prefix_caching: bool | None = None
) -> list[str]:
    """The flags of a policy's parameters, all of them; none for another policy, which runs inside
    with vLLM's own.

    `prefix_caching`, where it is said, holds whatever the parameters say. `InputError` for what is
    no parameter.
    """
    if policy != POLICY:
        return [] if prefix_caching is None else [_switch("enable-prefix-caching", prefix_caching)]
    found = parameters(make_any(policy, given))
    if prefix_caching is not None:
        found["prefix_caching"] = prefix_caching
    words: list[str] = []
    for name, value in found.items():
        if isinstance(value, bool):
            words.append(_switch(SWITCHES[name], value))
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _switch(flag: str, on: bool) -> str:
    return f"--{flag}" if on else f"--no-{flag}"
