"""`make demo-ray`: serve on a Ray cluster of two nodes, kill one under load, lose no request.

    python -m benchmarks.serving.demo_ray [--out DIR] [--plan PLAN] [--rate R] [--seconds S]

Takes a few minutes. Needs Ray (`pip install 'llmctl-toolkit[ray]'`); nothing is downloaded.

The nodes are two raylets on this machine, each with one worker of a tiny Llama on the CPU. The
benchmark starts and ends them, with a token of their own. The same requests are replayed three
times: against workers in processes, against Ray, and against Ray while one node is killed with all
its processes and another node joins later.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import typer

from benchmarks.common.command import LLMCTL, ended, make_parser
from benchmarks.common.serving import Server
from toolkit.bench.predict import counts
from toolkit.cli.arguments import open_recipe
from toolkit.cli.output import table
from toolkit.endpoints.target import Target, find_target
from toolkit.errors import InputError
from toolkit.files.bench import BenchReport
from toolkit.files.io import read_file, write_file
from toolkit.units import seconds

ESTIMATE = "some three minutes on two cores, half of them measuring"
PROCESSES = "processes"
KILL_AT = 0.3  # as a share of the replay
PATIENCE_S = 120.0
STORE_BYTES = 80 << 20
Counts = dict[str, float]  # of /metrics, by series
SMALL: dict[str, object] = {"batch_sizes": [1, 8, 24], "input_lengths": [16, 96, 256]}
SMALL |= {"cached_lengths": [16, 160, 448], "memory_lengths": [384], "slices": 6, "repeats": 2}


class Nodes:
    """A Ray cluster on this machine: a head node, which the server belongs to, and a second node
    that may be killed.
    """

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self._options = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "temp_dir": str(folder)}
        self.cluster: Any = Cluster(
            initialize_head=True, head_node_args=self._options | {"include_dashboard": False}
        )
        self.join()

    def join(self) -> None:
        """Add a second node."""
        self.cluster.add_node(**self._options)

    def kill(self) -> int:
        """Send SIGKILL to the second node's raylet and all its processes. Returns how many."""
        (node,) = self.cluster.worker_nodes
        (raylet,) = node.all_processes["raylet"]
        root = psutil.Process(raylet.process.pid)
        victims = [root, *root.children(recursive=True)]
        for victim in victims:
            victim.kill()
        self.cluster.remove_node(node, allow_graceful=False)
        return len(victims)


@contextmanager
def cluster() -> Iterator[Nodes]:
    """Two nodes until the block ends. Nothing of them is left then, and another cluster of this
    user stays as it was.
    """
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "error"
    # Imported here: Ray reads its environment when it is imported.
    from ray._common.utils import get_ray_address_file

    # The file names the cluster that `--ray auto` and `ray.init()` join.
    address_file = Path(get_ray_address_file(None))
    before = address_file.read_text() if address_file.exists() else None
    address_file.unlink(missing_ok=True)  # Ray warns when it overwrites the file
    # In /tmp, since the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="llmctl-ray-", dir="/tmp"))
    nodes = None
    try:
        nodes = Nodes(folder)
        yield nodes
    finally:
        if nodes is not None:
            nodes.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        if before is not None:
            address_file.write_text(before)
        else:
            address_file.unlink(missing_ok=True)


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def run(*words: object) -> None:
    """Show a command of llmctl and run it; `typer.Exit` where it fails."""
    line = [str(word) for word in words]
    print(f"$ llmctl {' '.join(line)}", flush=True)
    code = subprocess.run([*LLMCTL, *line], check=False).returncode
    if code:
        raise typer.Exit(code)


def make_plan(out: Path) -> Path:
    """A quick profile of the tiny Llama, its fit and its plan."""
    recipe = open_recipe(Path("tiny-llama-cpu"))
    small = recipe.model_copy(update={"profile": recipe.profile.model_copy(update=SMALL)})
    files = {name: out / f"{name}.json" for name in ("recipe", "profile", "fit", "plan")}
    write_file(small, files["recipe"])
    run("profile", files["recipe"], "--out", files["profile"])
    run("fit", files["profile"], "--out", files["fit"])
    run("render", files["recipe"], "--fit", files["fit"], "--out", files["plan"])
    return files["plan"]


class Replay:
    """One server and one replay against it; the replay's output goes to a file."""

    def __init__(self, plan: Path, out: Path, arguments: argparse.Namespace) -> None:
        self._plan = plan
        self._out = out
        self._load = ["--rate", arguments.rate, "--duration", arguments.seconds, "--warmup", 0]
        self._seconds = arguments.seconds

    def run(
        self, name: str, *serve: object, nodes: Nodes | None = None
    ) -> tuple[BenchReport, Counts]:
        """Serve with these options, and replay. With `nodes`, one of them is killed during the
        replay, and another one joins.
        """
        report = self._out / f"bench-{name}.json"
        options = ["--port", "0", "--allow-end-after", *map(str, serve)]
        with Server(self._plan, *options, log=self._out / "serve.log") as server:
            target = find_target(server.url)
            words = ["--url", server.url, "--plan", self._plan, *self._load, "--out", report]
            words = ["bench", *words]
            words = [str(word) for word in words]
            print(f"$ llmctl {' '.join(words)}", flush=True)
            with (self._out / f"bench-{name}.txt").open("w") as said:
                command = [*LLMCTL, *words]
                with subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as bench:
                    if nodes:
                        self._disturb(target, nodes, bench)
            if bench.returncode:
                print(f"error: the replay failed; see {said.name}", file=sys.stderr)
                raise typer.Exit(bench.returncode)
            if nodes:
                _wait(lambda: counts(target)["llmctl_workers_alive"] == 2)
                print("  both workers are alive again")
            seen = counts(target)
            server.end()
        return read_file(BenchReport, report), seen

    def _disturb(self, target: Target, nodes: Nodes, bench: subprocess.Popen[bytes]) -> None:
        _wait(lambda: bench.poll() is not None or counts(target)["llmctl_requests_running"] > 0)
        began_s = time.monotonic()
        time.sleep(KILL_AT * self._seconds)
        running = counts(target)["llmctl_requests_running"]
        killed = nodes.kill()
        what = f"killed a node, {killed} processes; {running:.0f} requests ran"
        print(f"  {KILL_AT * self._seconds:.0f} s in: {what}")
        _wait(lambda: bench.poll() is not None or counts(target)["llmctl_workers_alive"] == 1)
        what = "the server has noticed; the lost requests run on the other node"
        print(f"  {time.monotonic() - began_s:.0f} s in: {what}")
        nodes.join()
        print(f"  {time.monotonic() - began_s:.0f} s in: another node has joined")


def _wait(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end_s:
            raise InputError(f"the cluster did not get there within {PATIENCE_S:g} s")
        time.sleep(0.1)


def show(results: dict[str, tuple[BenchReport, Counts]]) -> None:
    """Print the three replays beside each other."""
    base = results[PROCESSES][0].measured["throughput_rps"]
    rows = []
    for name, (report, seen) in results.items():
        hop_ms = 1e3 * seen["llmctl_hop_seconds_sum"] / max(seen["llmctl_hop_seconds_count"], 1)
        lost = int(seen["llmctl_worker_restarts_total"])
        measured = report.measured
        failed = sum(report.failures.values())
        ratio = measured["throughput_rps"] / base
        counts = [report.answered - failed, failed, lost]
        rows.append([name, *counts, measured["throughput_rps"], f"{ratio:.2f}x", hop_ms])
    table(["workers", "served", "failed", "lost", "requests/s", ">ratio", "hop, ms"], rows)
    print("hop: from the end of a worker's batch to the start of its next, where one was there")


def demo(arguments: argparse.Namespace) -> None:
    """Run everything. `typer.Exit` where a command or a request failed."""
    began_s = time.monotonic()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    print(f"a Ray cluster of two nodes on this machine; {ESTIMATE}")
    title("1/5  measure a tiny Llama, quickly, and plan")
    replay = Replay(arguments.plan or make_plan(out), out, arguments)
    title("2/5  two workers in processes, for comparison")
    results = {PROCESSES: replay.run("processes")}
    title("3/5  a Ray cluster: two nodes of one CPU each, entered with a token")
    with cluster() as nodes:
        address = nodes.cluster.address
        print(f"  its head is {address}")
        title("4/5  two workers on Ray")
        results["Ray"] = replay.run("ray", "--ray", address)
        title("5/5  the same, and a node is killed under load")
        results["Ray, a node killed"] = replay.run("ray-killed", "--ray", address, nodes=nodes)
    print()
    show(results)
    failed = sum(sum(report.failures.values()) for report, _ in results.values())
    print(f"the demo took {seconds(time.monotonic() - began_s)}; its files are in {out}/")
    if failed:
        raise typer.Exit(1)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out/ray"), help="folder for the files of all stages"
    )
    parser.add_argument(
        "--plan", type=Path, help="serve this plan of two workers on the CPU instead of measuring"
    )
    parser.add_argument("--rate", type=float, default=18.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests arrive")
    given = parser.parse_args()
    try:
        return ended(lambda: demo(given))
    except typer.Exit as exited:
        return exited.exit_code


if __name__ == "__main__":
    sys.exit(main())
