"""Child processes end with the one that started them, however it ended."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

import toolkit

pytestmark = pytest.mark.slow  # every test starts processes

ROOT = Path(toolkit.__file__).parent.parent
# A program that starts a child and is killed. The child prints its processes once they run.
KILLED = """
import os, signal, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    start_new_session=True,
)
print(child.stdout.readline(), flush=True)
if sys.argv[2] == "stopped":
    os.kill(child.pid, signal.SIGSTOP)
os.kill(child.pid if sys.argv[2] == "child" else os.getpid(), signal.SIGKILL)
child.wait()
sys.stdin.read()
"""
WORKER = """
import os, time
from toolkit.processes.lifeline import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
time.sleep(600)
"""
# vLLM's server, which starts an engine; neither listens to SIGTERM.
SERVER = """
import os, signal, subprocess, sys, time, types
from toolkit.backends.vllm import child
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child.END_S = 0.2
vllm = types.ModuleType("vllm.entrypoints.cli.main")
def main():
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), engine.pid, flush=True)
    time.sleep(600)
vllm.main = main
for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["vllm.entrypoints.cli.main"] = vllm
child.main()
"""


@pytest.mark.parametrize(
    ("program", "how"),
    [(WORKER, "parent"), (WORKER, "stopped"), (SERVER, "parent"), (SERVER, "stopped"),
     (SERVER, "child")],
)  # fmt: skip
def test_nothing_outlives_a_killed_process(program: str, how: str) -> None:
    line = [sys.executable, "-c", KILLED, textwrap.dedent(program), how]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as killed:
        pids = [int(word) for word in killed.stdout.readline().split()]
        left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        if how != "child":
            assert killed.wait() == -signal.SIGKILL
        _, alive = psutil.wait_procs(left, timeout=30)
        killed.kill()
    for process in alive:
        os.kill(process.pid, signal.SIGKILL)
    assert pids
    assert alive == []
