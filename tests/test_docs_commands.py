"""Every command that README and docs show in a code block runs as it is written.

The package is built as a wheel and installed, without its dependencies, into a folder of its own.
Each page's commands then run in order in an empty folder that has what the page supposes of a
reader: a measured profile, a trace, a plan. Each runs in a process of its own, which a process that
has imported the package forks (`FORKS`). What needs a GPU gets the shipped (analytic) profile in
place of a measurement and a stand-in for vLLM's server. A command that serves is left running for
those after it. What cannot run here is listed with the reason. The numbers that the pages in
`FIGURES` show of a command's output are compared with what it prints.
"""

import gzip
import json
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import certificates
import fake_vllm_server
import pytest
import yaml
from filelock import FileLock
from lean import shorter_traces
from test_traces_histograms import EARLY, LATE
from test_traces_histograms import page as metrics_page

from benchmarks.common import PLUGINS
from benchmarks.common.serving import fake_plan
from toolkit import compiled
from toolkit.errors import InputError, LateClientError, LimitsBrokenError
from toolkit.files.io import head, processor, write_file

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GPU_RECIPE = "llama-3.1-8b-h200"
TIMEOUT_S = 300
# What pages leave to their readers.
WORDS = {"RECIPE": "tiny-llama-cpu", "TRACE": "traffic.jsonl", "FOLDER": "deploy"}
# Durations that a page recommends and a test need not wait for.
SHORTER = {
    "--duration 20": "--duration 2",
    "--duration 30": "--duration 2",
    "by-law,hpa,keda,saturation,tokens --trials 6": "by-law --trials 1",
}
# What commands that do not say it get, by their first word.
FEWER = {"tune": {"--trials": "8"}, "bench": {"--duration": "2", "--warmup": "1"}}
# And also where a page's figures are compared: a process takes seconds to start.
ALONE = {"tune": {"--jobs": "1"}}
# Pages with output that every machine prints alike: their fits ship.
FIGURES = ("docs/how-to/capacity.md", "docs/tutorials/reading-a-verdict.md")
VERDICT = "llmctl tune tiny-llama-cpu --fit tiny-llama-cpu --trace chat-small --policies own"
CAPACITY = f"llmctl capacity {GPU_RECIPE} --trace chat-small"
CHECKED = "needs vLLM's own schedulers; tests/test_conformance.py has made-up ones"
LIVE = "needs a vLLM of its own; tests/test_live_real_vllm.py runs these where there is one"
CLUSTER = "needs a Ray cluster; tests/test_cluster.py starts one"
NUMBER = r"\d+(?:[.,]\d+)*"
T = TypeVar("T")


def named(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """The page, its lines that end with a backslash joined with those that follow them."""
    return re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))


def code_lines(page: Path) -> Iterator[str]:
    """The lines of a page's code blocks, indented or fenced, without a prompt's `$`."""
    fence = ""
    for line in text_of(page).splitlines():
        if line.startswith("```"):
            fence = "" if fence else line.removeprefix("```") or "text"
        elif fence in ("text", "sh", "console") or (not fence and line.startswith("    ")):
            yield line.strip().removeprefix("$ ")


def commands(page: Path) -> list[str]:
    """The page's commands of llmctl, without comments; those joined by && one by one."""
    whole = (re.split(r"\s+#", line)[0].rstrip(" &") for line in code_lines(page))
    parts = (part.strip() for line in whole for part in line.split(" && "))
    return [part for part in parts if part.startswith("llmctl ")]


def shown_output(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each line of output among a page's code lines, after the last command before it."""
    command = ""
    for line in lines:
        if line.startswith("llmctl "):
            command = line
        elif command and line:
            yield command, line


def is_printed(line: str, output: str) -> bool:
    """Whether a line of `output` has this line's numbers in order, whatever the words."""
    for printed in output.splitlines():
        there = iter(re.findall(NUMBER, printed))
        if all(number in there for number in re.findall(NUMBER, line)):
            return True
    return False


def named_files(page: Path) -> dict[str, str]:
    """The YAML files that the page shows, by the name in their first line."""
    blocks = re.findall(
        r"^```(?:yaml|text)\n# (\S+\.yaml|keys)\n(.*?)^```",
        page.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    return dict(blocks)


# Runs each command of a line in a fork, so that what takes seconds to import is imported once. All
# processes of a run share their simulations: pages ask for the same capacity again, beside others.
# Where a page's figures are not compared, the shipped traces are shorter, and so are those that a
# verdict needs.
FORKS = """
import gc, hashlib, json, os, pathlib, pickle, sys
import optuna, rich.console, rich.table
import toolkit.api, toolkit.estimators.fitting, toolkit.report.capacity, toolkit.tuning.tune
import toolkit.tuning.capacity, toolkit.tuning.workload
from toolkit import __main__ as llmctl
from toolkit.cli import main
for name in main.COMMANDS:
    main._load(name)
kept, short = map(pathlib.Path, sys.argv[1:])
simulate = toolkit.tuning.evaluate.Task.simulate
def simulated(task, window):
    asked = pickle.dumps((task.deployment, task.windows[window], task.sla))
    file = kept / hashlib.sha256(asked).hexdigest()
    if not file.exists():
        made = file.with_suffix(f".{os.getpid()}")
        made.write_bytes(pickle.dumps(simulate(task, window)))
        made.rename(file)
    return pickle.loads(file.read_bytes())
toolkit.tuning.evaluate.Task.simulate = simulated
gc.freeze()
for line in sys.stdin:
    folder, streams, environment, whole, sys.argv[1:] = json.loads(line)
    child = os.fork()
    if not child:
        if not whole:
            toolkit.tuning.capacity.LASTING = toolkit.tuning.workload.LASTING = 5.0
            toolkit.traces.types.FOLDER = short
        os.chdir(folder)
        os.environ.update(environment)
        for number, path in enumerate(streams):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        llmctl.main()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Installed:
    """The wheel's files, where Python finds them, free ports in place of those that pages name, and
    the process of `FORKS`.
    """

    site: Path
    ports: Mapping[str, str]
    forks: subprocess.Popen[str]


@dataclass
class Folder:
    """A reader's folder, and the installed package's command in it."""

    path: Path
    installed: Installed
    servers: list[subprocess.Popen[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=lambda: dict(WORDS))
    whole: bool = False  # commands run as they are written, for what they print

    def run(self, command: str, *codes: int) -> str:
        """What one command prints until its end, on both streams; `> FILE` keeps stdout there."""
        command, _, file = command.partition(" > ")
        out = self.path.with_name("stdout")
        err = self.path.with_name("stderr")
        streams = [os.devnull, str(out), str(err)]
        job = [str(self.path), streams, self.environment, self.whole, self._words(command)]
        forks = self.installed.forks
        assert forks.stdin is not None
        assert forks.stdout is not None
        print(json.dumps(job), file=forks.stdin, flush=True)
        assert select.select([forks.stdout], [], [], TIMEOUT_S)[0], f"$ {command}: it goes on"
        ended = int(forks.stdout.readline())
        printed = f"{out.read_text(encoding='utf-8')}\n{err.read_text(encoding='utf-8')}"
        assert ended in (codes or (0,)), f"$ {command}\n{printed}"
        if file:
            shutil.copy(out, self.path / file)
        return printed

    def serve(self, command: str) -> None:
        """A command that goes on until it is stopped; returns when it says that it is ready."""
        self.stop(command.split()[1])
        output = self.path / f"server-{len(self.servers)}.log"
        with output.open("w") as log:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "toolkit", *self._words(command)],
                cwd=self.path,
                env=environment(self.installed.site) | self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.servers.append(server)
        assert server.stdout is not None
        if not server.stdout.readline():
            pytest.fail(f"$ {command}\nexit code {server.wait(TIMEOUT_S)}\n{output.read_text()}")

    def stop(self, command: str = "") -> None:
        """End what still runs, of one command or of all, newest first."""
        for server in reversed(self.servers):
            if not command or command in server.args:  # type: ignore[operator]
                server.terminate()
                server.communicate(timeout=TIMEOUT_S)

    def _words(self, command: str) -> list[str]:
        for long, short in SHORTER.items():
            if not command.startswith("llmctl trace"):
                command = command.replace(long, short)
        first = command.split()[1]
        fewer = {} if self.whole else FEWER.get(first, {})
        for option, value in (fewer | ALONE.get(first, {})).items():
            if option not in command:
                command += f" {option} {value}"
        for named, port in self.installed.ports.items():
            command = command.replace(f":{named}", f":{port}")
        return [self.words.get(word, word) for word in shlex.split(command)[1:]]


@dataclass(frozen=True)
class Script:
    """What a page supposes, and what is done otherwise than it says. Keys begin a command."""

    prepare: Callable[[Folder], None] = lambda _: None
    before: Mapping[str, Callable[[Folder], None]] = field(default_factory=dict)
    instead: Mapping[str, Callable[[Folder], None]] = field(default_factory=dict)
    codes: Mapping[str, int] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # why it does not run here


def of(command: str, table: Mapping[str, T]) -> T | None:
    """The entry of the longest key that `command` begins with."""
    fitting = [key for key in table if command.startswith(key)]
    return table[max(fitting, key=len)] if fitting else None


def environment(site: Path) -> dict[str, str]:
    """That of processes: the files of `site` come before those of this checkout, which an editable
    install puts on the path. Compiled code runs where there is some, as it does for a reader.
    """
    kept = {name: value for name, value in os.environ.items() if name != compiled.VARIABLE}
    return kept | {"PYTHONPATH": os.pathsep.join((str(site), PLUGINS))}


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def install(folder: Path) -> Path:
    """The wheel, built and unpacked in `folder`, by the first process of a parallel run that
    asks.
    """
    with FileLock(folder / "wheel.lock"):
        site = folder / "site"
        if not site.exists():
            build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
            subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
            [wheel] = folder.glob("*.whl")
            shutil.unpack_archive(wheel, folder / "unpacked", "zip")
            assert not (folder / "unpacked" / "benchmarks").exists()  # they are for a checkout
            compile_kernels(folder / "unpacked")
            (folder / "unpacked").rename(site)
    return site


def compile_kernels(site: Path) -> None:
    """numba keeps what it compiles beside the source: copies of `site` have it, too."""
    trace = site.parent / "few.jsonl"
    rows = [{"timestamp": k, "input_length": 9 + k, "output_length": 5 + k} for k in range(40)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["simulate", GPU_RECIPE, "--policies", "all", "--trace", trace]
    subprocess.run(
        [sys.executable, "-P", "-m", "toolkit", *words],
        env=os.environ | {"PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
    )


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel's files; its recipes name a free port, so that no other server is met."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    site = shutil.copytree(install(shared), tmp_path_factory.mktemp("installed") / "site")
    if not compiled.unusable():
        there = compiled.FOLDER.relative_to(compiled.PACKAGE)
        shutil.copytree(compiled.FOLDER, site / "toolkit" / there, dirs_exist_ok=True)
    ports = {"8000": free_port(), "8100": free_port()}
    for recipe in (site / "toolkit" / "_data" / "recipes").glob("*.yaml"):
        recipe.write_text(recipe.read_text().replace("port: 8000", f"port: {ports['8000']}"))
    kept = shared / "simulations"
    kept.mkdir(exist_ok=True)
    short = shorter_traces(tmp_path_factory.mktemp("traces"))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", FORKS, kept, short],
        env=environment(site),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forks:
        yield Installed(site, ports, forks)


@pytest.fixture(scope="session")
def tuned(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has when the first steps are done: traces, and the tiny model from profile to
    plan.

    The shipped profile stands for one that was measured here, which takes a minute.
    """
    folder = Folder(tmp_path_factory.mktemp("reader"), installed)
    write_traffic(folder)
    measured_here(folder)
    folder.run("llmctl fit profile.json")
    folder.run("llmctl tune tiny-llama-cpu --trace traffic.jsonl")
    folder.run("llmctl render tiny-llama-cpu --fit fit.json --tuning tuning.json --force")
    return folder.path


def write_traffic(folder: Folder) -> None:
    """traffic.jsonl, and the same in Azure's format; a longer one under the real trace's name."""
    shape = "--prompt lognormal:100:0.5 --output lognormal:40:0.5 --longest 256 --seed 3"
    folder.run(f"llmctl trace generate --rate 10 --duration 20 {shape} --out traffic.jsonl")
    folder.run(f"llmctl trace generate --rate 10 --duration 170 {shape} --out longer.jsonl")
    for source, name in (("traffic", "azure.csv"), ("longer", "azure-2023-conv.csv")):
        rows = map(json.loads, (folder.path / f"{source}.jsonl").read_text().splitlines())
        lines = [f"{clock(row)},{row['input_length']},{row['output_length']}\n" for row in rows]
        text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines)
        (folder.path / name).write_text(text)


def clock(row: Mapping[str, float]) -> str:
    minutes, seconds = divmod(row["timestamp"] / 1000, 60)
    return f"2023-11-16 18:{15 + int(minutes)}:{seconds:010.7f}"


def shipped(folder: Folder, recipe: str, name: str) -> str:
    return (folder.installed.site / "toolkit" / "_data" / "profiles" / recipe / name).read_text(
        encoding="utf-8"
    )


def measured_here(folder: Folder) -> None:
    """profile.json: the tiny model's, as if its processor were this machine's."""
    import torch
    import transformers

    profile = json.loads(shipped(folder, "tiny-llama-cpu", "profile.json"))
    here = {"processor": processor(), "engine_version": transformers.__version__}
    profile["engine"] |= {key: value for key, value in here.items() if key in profile["engine"]}
    profile["environment"]["processor"] = processor()
    if "torch" in profile["environment"]["packages"]:
        profile["environment"]["packages"]["torch"] = torch.__version__
    (folder.path / "profile.json").write_text(json.dumps(profile))


def analytic_profile(folder: Folder) -> None:
    (folder.path / "profile.json").write_text(shipped(folder, GPU_RECIPE, "profile.json"))


def logs(folder: Folder) -> None:
    """A log under other names, conversations, a page of vLLM's metrics, and a plan."""
    rows = "when,in,out,conv\n0,5,6,a\n1500,20,7,a\n"
    (folder.path / "mine.csv.gz").write_bytes(gzip.compress(rows.encode()))
    talk = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]
    (folder.path / "sharegpt.json").write_text(json.dumps([{"conversations": talk}]))
    planned_without_work(folder)
    (folder.path / "metrics.txt").write_text(metrics_page(*EARLY, *LATE))


def stand_in_for_vllm(folder: Folder) -> None:
    folder.environment["LLMCTL_VLLM_PYTHON"] = fake_vllm_server.install(folder.path / "vllm")


def stand_in_and_a_short_grid(folder: Folder) -> None:
    """The page's recipe with a third of the measurements."""
    stand_in_for_vllm(folder)
    own = folder.installed.site / "toolkit" / "_data" / "recipes" / "tiny-llama-vllm.yaml"
    recipe = yaml.safe_load(own.read_text(encoding="utf-8"))
    recipe["profile"] |= {
        "batch_sizes": [1, 4, 16],
        "input_lengths": [16, 64, 160],
        "cached_lengths": [32, 96, 240],
        "repeats": 1,
    }
    folder.words["tiny-llama-vllm"] = "short.yaml"
    (folder.path / "short.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def planned_for_this_machine(folder: Folder) -> None:
    """The plan of a GPU as if it had been profiled on this CPU, for the stand-in to serve."""
    plan = json.loads((folder.path / "plan.json").read_text())
    plan["recipe"]["hardware"]["device"] = "cpu"
    plan["fit"]["engine"] |= {
        "device": "cpu",
        "processor": processor(),
        "engine_version": "0.32.0",
        "analytic": "",
    }
    (folder.path / "plan.json").write_text(json.dumps(plan))


def certificate(folder: Folder) -> None:
    certificate, key = certificates.self_signed(folder.path, "tls")
    certificate.rename(folder.path / "tls.crt")
    key.rename(folder.path / "tls.key")


def serving(folder: Folder) -> None:
    """A server runs."""
    if all(server.poll() is not None for server in folder.servers):
        folder.serve("llmctl serve plan.json")


def planned_without_work(folder: Folder) -> None:
    """The plan of an engine that computes nothing, and so loads at once; its recipe and its fit."""
    made = fake_plan(folder.path)
    serve = made.recipe.serve.model_copy(update={"port": int(folder.installed.ports["8000"])})
    recipe = made.recipe.model_copy(update={"serve": serve})
    write_file(made.model_copy(update={"recipe": recipe}), folder.path / "plan.json")
    folder.words["RECIPE"] = "own.yaml"
    write_file(recipe, folder.path / "own.yaml")  # JSON is YAML
    about = head({"recipe": folder.path / "own.yaml"})
    write_file(made.fit.model_copy(update=dict(about)), folder.path / "fit.json")


def recorded(folder: Folder) -> None:
    """The recorder has seen traffic, and has ended."""
    folder.stop("trace")
    shutil.copy(folder.path / "traffic.jsonl", folder.path / "mine.jsonl")


def quick_recipe(folder: Folder) -> None:
    """A recipe with a grid that takes seconds to measure."""
    folder.words["RECIPE"] = "quick.yaml"
    port = f"serve: {{port: {folder.installed.ports['8000']}}}\n"
    (folder.path / "quick.yaml").write_text(QUICK + port)


def quick_plan(folder: Folder) -> None:
    """A plan of that recipe, with the times that were measured here. A server that takes no time
    would be asked for thousands of requests a second.
    """
    quick_recipe(folder)
    recipe = (folder.path / "quick.yaml").read_text()
    slow = recipe.replace(
        "{model_type: fake}", "{model_type: fake, prefill_s: 0.02, decode_s: 0.002}"
    )
    (folder.path / "quick.yaml").write_text(slow)
    folder.run("llmctl profile RECIPE")
    folder.run("llmctl fit profile.json")
    folder.run("llmctl render RECIPE --fit fit.json")


def tuned_on_azure(folder: Folder) -> None:
    folder.run("llmctl tune RECIPE --fit fit.json --trace azure.csv --policies own --trials 2")
    folder.run("llmctl render RECIPE --fit fit.json --tuning tuning.json --force")
    folder.serve("llmctl serve plan.json")


QUICK = """\
name: quick
model:
  source: random
  config: {model_type: fake}
  dtype: float32
  max_model_len: 512
  tokenizer: bytes
hardware: {device: cpu, name: any}
engine: {name: fake, kv_cache_memory_mib: 2}
profile:
  {batch_sizes: [1, 2, 4, 8], input_lengths: [16, 64, 128], cached_lengths: [16, 64, 128],
   memory_lengths: [16, 64]}
sla: {ttft_p99_s: 5}
"""


RESULTS = {
    named(page): Script(elsewhere={"llmctl": "how results were made; each takes minutes"})
    for page in PAGES
    if page.parent.name == "results"
}
SCRIPTS = RESULTS | {
    "README.md": Script(
        prepare=stand_in_for_vllm,
        before={"llmctl serve plan.json": planned_for_this_machine},
        instead={f"llmctl profile {GPU_RECIPE}": analytic_profile},
    ),
    "docs/tutorials/first-run.md": Script(instead={"llmctl profile": measured_here}),
    "docs/tutorials/your-model.md": Script(
        prepare=stand_in_for_vllm,
        before={"llmctl serve plan.json": planned_for_this_machine},
        instead={f"llmctl profile {GPU_RECIPE}": analytic_profile},
    ),
    "docs/tutorials/reading-a-verdict.md": Script(
        codes={f"{VERDICT} --rate 60": LimitsBrokenError.exit_code}
    ),
    "docs/how-to/capacity.md": Script(
        codes={
            f"llmctl capacity {GPU_RECIPE}-measured --trace chat-small": InputError.exit_code,
            f"{CAPACITY} --also prefix_caching=false": InputError.exit_code,
            f"{CAPACITY} --also num_speculative_tokens": InputError.exit_code,
        }
    ),
    "docs/how-to/measure.md": Script(
        prepare=quick_plan,
        before={"llmctl bench --plan plan.json --tuning": tuned_on_azure},
    ),
    "docs/how-to/ray.md": Script(elsewhere={"llmctl serve plan.json --ray": CLUSTER}),
    "docs/how-to/record-a-trace.md": Script(
        prepare=planned_without_work,
        before={"llmctl trace record": serving, "llmctl trace inspect mine.jsonl": recorded},
    ),
    "docs/how-to/vllm.md": Script(
        prepare=stand_in_and_a_short_grid, elsewhere={"llmctl vllm-check": CHECKED}
    ),
    "docs/how-to/live.md": Script(elsewhere={"llmctl": LIVE}),
    "docs/how-to/replicas.md": Script(
        elsewhere={
            "llmctl serve plan.json --replica": "a file, a name or a cluster of the reader's"
        },
    ),
    "docs/how-to/upgrade.md": Script(
        prepare=planned_without_work,
        elsewhere={
            "llmctl vllm-check": CHECKED,
            "llmctl serve plan.json --replica": "a file of the reader's",
        },
    ),
    "docs/how-to/serve.md": Script(
        prepare=planned_without_work,
        before={"llmctl serve plan.json --ssl-certfile": certificate},
    ),
    "docs/explanation/profiling.md": Script(prepare=quick_recipe),
    "docs/reference/traces.md": Script(
        prepare=logs,
        before={"llmctl trace record": serving},
    ),
}


@pytest.fixture
def folder(installed: Installed, tuned: Path, tmp_path: Path) -> Iterator[Folder]:
    """A folder like `tuned`; what is served from it ends with the test."""
    one = Folder(shutil.copytree(tuned, tmp_path / "reader"), installed)
    one.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    yield one
    one.stop()


@pytest.mark.timeout(1500)  # a page of searches takes minutes of plain Python, more beside others
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=named)
def test_every_command_of_a_page_runs_as_it_is_written(page: Path, folder: Folder) -> None:
    script = SCRIPTS.get(named(page), Script())
    for name, text in named_files(page).items():
        (folder.path / name).write_text(text)
    script.prepare(folder)
    folder.whole = named(page) in FIGURES
    printed = {command: run(command, script, folder) for command in commands(page)}
    if folder.whole:
        shown = list(shown_output(code_lines(page)))
        assert {command for command, _ in shown} & set(printed)
        assert [line for command, line in shown if not is_printed(line, printed[command])] == [], (
            printed
        )


def run(command: str, script: Script, folder: Folder) -> str:
    """What the command printed; nothing where it serves, or something else was done."""
    if of(command, script.elsewhere):
        return ""
    if step := of(command, script.before):
        step(folder)
    if step := of(command, script.instead):
        step(folder)
        return ""
    if command.startswith(("llmctl serve ", "llmctl trace record ")):
        folder.serve(command)
        return ""
    code = of(command, script.codes) or 0
    if command.startswith("llmctl bench "):  # beside other tests its client may be late
        return folder.run(command, code, LateClientError.exit_code)
    return folder.run(command, code)
