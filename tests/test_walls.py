"""The floors of the project and the walls around its libraries, held by reading every import."""

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

import toolkit
from toolkit.engine_traits import ENGINES

pytestmark = pytest.mark.slow

PACKAGE = Path(toolkit.__file__).parent

FLOORS = {
    "errors": 0, "units": 0, "extras": 0, "engine_traits": 0, "compiled": 0,
    "interrupts": 0, "catalogue": 0, "processes": 0,
    "sched": 1, "laws": 1, "files": 1, "openai": 1,
    "adopt": 2,
    "estimators": 2, "engines": 2, "workers": 2, "cluster": 2, "traces": 2, "metrics": 2,
    "endpoints": 2,
    "routing": 2, "scaling": 2, "sim": 3, "profiling": 3, "server": 3,
    "backends": 4, "api": 4,
    "tuning": 5, "deploy": 5, "bench": 5, "report": 5,
    "live": 6,
    "cli": 7,
}  # fmt: skip
SAME_FLOOR = {
    ("files", "laws"),
    ("files", "sched"),
    ("engine_traits", "errors"),
    ("engine_traits", "extras"),
    ("extras", "errors"),
    ("compiled", "errors"),
    ("catalogue", "errors"),
    ("processes", "errors"),
    ("workers", "engines"),
    ("cluster", "workers"),
    ("cluster", "engines"),
}

# A library, and where under toolkit/ it may be imported.
ONLY_IN = {
    "torch": "engines/", "transformers": "engines/", "tokenizers": "engines/",
    "safetensors": "engines/",
    "deepspeed": "engines/",
    "ray": "cluster/",
    "vllm": "backends/vllm/",
    "optuna": "tuning/",
    "scipy": "estimators/",
    "numba": "sched/kernels.py",
    "fastapi": "server/", "starlette": "server/", "uvicorn": "server/",
    "prometheus_client": ("server/", "endpoints/", "backends/vllm/"),
    "aiohttp": "endpoints/", "yarl": "endpoints/", "httptools": "server/",
    "yaml": ("files/", "catalogue/tables.py"),
    "typer": "cli/",
}  # fmt: skip
NOWHERE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "httpx"}
NOT_IN_SCHED = {
    "time",
    "asyncio",
    "random",
    "os",
    "socket",
    "threading",
    "datetime",
    "logging",
    "uuid",
    "secrets",
}
NEVER_CALLED = {"yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.load"}


def imports(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every module that is imported, also inside functions, absolutely named."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            if node.module == "toolkit":
                yield from (f"toolkit.{alias.name}" for alias in node.names)


def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of a module, itself first."""
    return list(ast.walk(ast.parse(source)))


@cache
def nodes_in(path: Path) -> list[ast.AST]:
    return nodes_of(path.read_text(encoding="utf-8"))


def violations(path: str, nodes: Sequence[ast.AST]) -> list[str]:
    """What a file at `path`, relative to toolkit/, may not do and does."""
    room = path.split("/")[0].removesuffix(".py")
    found = []
    for name in imports(nodes):
        top, _, inside = name.partition(".")
        if top == "toolkit":
            other = inside.split(".")[0]
            allowed = other not in FLOORS or other == room or (room, other) in SAME_FLOOR
            if not allowed and FLOORS[other] >= FLOORS[room]:
                found.append(f"{room} imports toolkit.{other}")
        elif (
            not path.startswith(ONLY_IN.get(top, ""))
            or top in NOWHERE
            or (room == "sched" and top in NOT_IN_SCHED)
        ):
            found.append(f"{room} imports {top}")
    found += [f"calls {name}" for name in map(dotted, nodes) if name in NEVER_CALLED]
    return found


def dotted(node: ast.AST) -> str:
    """'yaml.load' of an attribute of a name, '' of anything else."""
    return (
        f"{node.value.id}.{node.attr}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        else ""
    )


def sources() -> list[str]:
    """Every module of a room; the package's own two, `__init__` and `__main__`, are on no floor."""
    paths = (str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in paths if not path.startswith("__"))


def test_imports_go_downwards_and_libraries_stay_in_their_room() -> None:
    found = {path: violations(path, nodes_in(PACKAGE / path)) for path in sources()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_every_room_has_its_floor() -> None:
    rooms = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if not path.name.startswith(("_", "."))
    }
    assert rooms - {"py.typed"} == FLOORS.keys()


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("sched/policies/x.py", "import toolkit.sim.api", ["sched imports toolkit.sim"]),
        ("sim/x.py", "from toolkit.server import app", ["sim imports toolkit.server"]),
        ("sim/x.py", "from toolkit import server", ["sim imports toolkit.server"]),
        ("engines/x.py", "from toolkit.workers import pool", ["engines imports toolkit.workers"]),
        ("workers/x.py", "from toolkit.engines import load", []),
        ("sim/x.py", "from toolkit.sched.types import Job", []),
        ("server/x.py", "def f():\n    import torch.nn", ["server imports torch"]),
        ("sched/scheduler.py", "import numba", ["sched imports numba"]),
        ("sched/scheduler.py", "import time", ["sched imports time"]),
        ("files/x.py", "import pickle", ["files imports pickle"]),
        ("files/x.py", "import yaml\nyaml.load('')", ["calls yaml.load"]),
        ("engines/x.py", "import torch\ntorch.load('')", ["calls torch.load"]),
    ],
)
def test_the_walls_stop_what_they_should(path: str, source: str, expected: list[str]) -> None:
    assert violations(path, nodes_of(source)) == expected


# Where a comparison with an engine's name is right, and why.
NAMES_ENGINES = {
    "deploy/doctor.py": "recommends vLLM by name",
    "files/profile.py": "profiles of 'rebatch' from before `joining` was in them",
}


def test_nothing_branches_on_the_name_of_an_engine() -> None:
    """What differs between engines is in `toolkit.engine_traits` and `toolkit.backends`."""
    found = [
        f"{path}: {ast.unparse(node)}"
        for path in sources()
        if path not in NAMES_ENGINES and not path.startswith(("backends/", "engines/"))
        for node in nodes_in(PACKAGE / path)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value in ENGINES
        if ".engine" in ast.unparse(node) or "engine" in ast.unparse(node.left)
    ]
    assert found == []


def test_one_public_name_is_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path in sources():
        for node in nodes_in(PACKAGE / path)[0].body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_broad_except_says_why() -> None:
    found = []
    for path in sources():
        lines = (PACKAGE / path).read_text(encoding="utf-8").splitlines()
        for node in nodes_in(PACKAGE / path):
            if isinstance(node, ast.ExceptHandler) and (
                node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            ):
                reason = lines[node.lineno - 1].partition("#")[2].replace("noqa: BLE001", "")
                if not reason.strip():
                    found.append(f"{path}:{node.lineno}")
    assert found == []


# Two classes that share this many public methods do one thing twice, unless a base says what it is.
TWIN_METHODS = 6
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_BASES = {"object", "Protocol", "Generic", "ABC", "NamedTuple", "Exception", "Struct"}
# Twins that are known, and why they are still two.
TWINS: dict[tuple[str, str], str] = {}


def classes(trees: Iterable[ast.Module]) -> dict[str, tuple[set[str], set[str]]]:
    """Of each class its own public methods and all its bases, also those of bases, by name. Without
    protocols: what has one need not name it.
    """
    methods: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                own = [one.name for one in node.body if isinstance(one, FUNCTIONS)]
                public = {name for name in own if not name.startswith("_")}
                methods[node.name] = methods.get(node.name, set()) | public
                named = [ast.unparse(base).partition("[")[0] for base in node.bases]
                bases.setdefault(node.name, set()).update(name.split(".")[-1] for name in named)
    protocols = {name for name, named in bases.items() if "Protocol" in named}
    for found in bases.values():
        while more := set().union(*[bases.get(base, set()) for base in found]) - found:
            found |= more
    return {
        name: (methods[name], bases[name] - NO_BASES) for name in methods if name not in protocols
    }


def twins(trees: Iterable[ast.Module]) -> set[tuple[str, str]]:
    """The pairs of classes that share `TWIN_METHODS` public method names and no base."""
    found = classes(trees)
    return {
        (first, second)
        for first, second in combinations(sorted(found), 2)
        if len(found[first][0] & found[second][0]) >= TWIN_METHODS
        and not ({first, *found[first][1]} & {second, *found[second][1]})
    }


def test_classes_that_share_six_methods_share_a_base() -> None:
    trees = [ast.parse((PACKAGE / path).read_text(encoding="utf-8")) for path in sources()]
    assert twins(trees) == TWINS.keys()


def test_twins_are_found_unless_they_share_a_base() -> None:
    body = "".join(f"\n    def {name}(self): ..." for name in "abcdef")
    source = "class One({0}):{1}\nclass Other({0}):{1}\nclass Base: ..."
    assert twins([ast.parse(source.format("", body))]) == {("One", "Other")}
    assert twins([ast.parse(source.format("Generic[T]", body))]) == {("One", "Other")}
    assert twins([ast.parse(source.format("Protocol", body))]) == set()
    assert twins([ast.parse(source.format("Base", body))]) == set()


@pytest.mark.parametrize(
    ("flag", "files"),
    [
        ("prefill_schedule_interval", 3),  # vLLM 0.33's newest: the policy, the rule, the reading
        ("long_prefill_token_threshold", 6),
        ("max_num_seqs", 10),
    ],
)
def test_a_flag_of_vllm_is_named_in_few_files(flag: str, files: int) -> None:
    named = [path for path in sources() if flag in (PACKAGE / path).read_text(encoding="utf-8")]
    assert len(named) <= files, named


# Statements (`ast.stmt`) of each room, at most. A new capability finds its place in a shape that
# exists; where it does not fit, say in docs/decisions.md why the ceiling rises.
CEILINGS = {
    "sim": 4100, "backends": 3693, "sched": 3299, "cli": 2789, "engines": 2804, "server": 3125,
    "files": 2625, "traces": 1818, "tuning": 2013, "estimators": 1235,
    "catalogue": 1658, "profiling": 1520, "deploy": 1441, "report": 1197, "openai": 874,
    "endpoints": 688, "adopt": 665, "workers": 442, "routing": 713, "bench": 689, "laws": 365,
    "scaling": 706, "live": 336, "cluster": 283, "processes": 438,
}  # fmt: skip


def test_no_room_is_heavier_than_its_ceiling() -> None:
    weights = dict.fromkeys(CEILINGS, 0)
    for path in sources():
        room, is_folder, _ = path.partition("/")
        if is_folder:
            weights[room] += sum(isinstance(one, ast.stmt) for one in nodes_in(PACKAGE / path))
    over = {room: weight for room, weight in weights.items() if weight > CEILINGS[room]}
    assert over == {}
