"""`llmctl serve` in a process of its own, for tests and benchmarks."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Self

import psutil

from benchmarks.common import samples
from benchmarks.common.command import LLMCTL
from toolkit.deploy.plan import make_plan
from toolkit.files.io import write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Settings


def fake_plan(folder: Path, policy: Settings | None = None, /, **config: float) -> Plan:
    """Write a plan of the fake engine in processes; `config` has the fields of FakeConfig. Without
    a policy it has the recipe's.
    """
    fake = {"model_type": "fake", **config}
    model: dict[str, object] = {"source": "random", "config": fake, "dtype": "float32"}
    model |= {"max_model_len": 512, "tokenizer": "bytes"}
    recipe = samples.recipe(model=model, serve={"max_new_tokens": 256, "port": 0})
    inputs = {"recipe": folder / "recipe.json", "fit": folder / "fit.json"}
    write_file(recipe, inputs["recipe"])
    write_file(samples.fit(), inputs["fit"])
    plan = make_plan(recipe, samples.fit(), None, inputs, policy)
    write_file(plan, folder / "plan.json")
    return plan


class Server:
    """`llmctl serve` in a process of its own, from before it listens until it has ended; `said` is
    what it wrote to stderr, once it has ended in order. `log`: the file to which its stderr is
    appended instead. `cwd`: of another checkout.
    """

    def __init__(
        self,
        plan: Path,
        *options: str,
        log: Path | None = None,
        cwd: Path | None = None,
        **environment: str,
    ) -> None:
        command = (*LLMCTL, "serve", str(plan), "--json", *options)
        with nullcontext(subprocess.PIPE) if log is None else log.open("a") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=cwd,
                env=os.environ | environment,
            )
        assert self.process.stdout is not None
        try:
            line = self.process.stdout.readline()
        except BaseException:  # Ctrl-C, or a time limit
            self.process.kill()
            raise
        if not line:
            raise RuntimeError(self.process.communicate()[1] or f"it ended: see {log}")
        self.ready = json.loads(line)
        self.url = self.ready["url"]
        self.said = ""

    def workers(self) -> list[psutil.Process]:
        """The child processes that have not ended."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.NoSuchProcess):
                child.cmdline()  # raises for one that has ended, also before it was waited for
                found.append(child)
        return found

    def end(self) -> int:
        """Send SIGTERM; the exit code."""
        self.process.terminate()
        _, self.said = self.process.communicate(timeout=60)
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def front(self) -> psutil.Process:
        return psutil.Process(self.process.pid)


@contextmanager
def fake_server(*options: str, **config: float) -> Iterator[Server]:
    """`llmctl serve` with these options, on two workers with fake engines; see `fake_plan`."""
    with tempfile.TemporaryDirectory() as folder:
        fake_plan(Path(folder), **config)
        with Server(Path(folder) / "plan.json", *options) as server:
            yield server


def metric(text: str, name: str) -> float:
    """A series of /metrics, summed over its labels."""
    lines = text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
