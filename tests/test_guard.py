"""The guard: processes that must not outlive another one end with it, however it ended."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.slow  # every test starts processes

FRONT = """
import os, signal, subprocess, sys
from toolkit import guard

def start(code):
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0)
    if code:
        os.read(child.stdout.fileno(), 1)
    return child

PARENT = (
    "import subprocess, sys; "
    "print(subprocess.Popen([sys.executable, '-c', %r]).pid, flush=True); "
)
PAUSE = "import signal; signal.pause()"
"""
NEWBORN = """
child = start("")
guard.watch(child.pid)
os.kill(child.pid, signal.SIGSTOP)  # before its interpreter runs
pids = [child.pid]
"""
BELOW = """
child = subprocess.Popen(
    [sys.executable, "-c", PARENT % PAUSE + PAUSE], stdout=subprocess.PIPE, process_group=0
)
guard.watch(child.pid)
pids = [child.pid, int(child.stdout.readline())]
os.kill(child.pid, signal.SIGSTOP)
"""
LEFT_BEHIND = """
child = subprocess.Popen(
    [sys.executable, "-c", PARENT % PAUSE], stdout=subprocess.PIPE, process_group=0
)
guard.watch(child.pid, grace_s=3600.0)
pids = [int(child.stdout.readline())]
child.wait()  # its own child has an hour no more
"""
COPY = """
guard.watch(1 << 30)
pids = [os.fork()]
if not pids[0]:
    os.kill(os.getpid(), signal.SIGSTOP)  # as a child between its fork and its program
os.waitpid(pids[0], os.WUNTRACED)
"""
GUARD_KILLED = """
import psutil
guard.watch(1 << 30)
for process in psutil.process_iter(["cmdline"]):
    if process.info["cmdline"] and process.info["cmdline"][-1] == str(os.getpid()):
        process.kill()
        psutil.wait_procs([process])
first, second = start(PAUSE_AFTER), start(PAUSE_AFTER)
guard.watch(first.pid)
guard.watch(second.pid)
pids = [first.pid, second.pid]
"""
END = """
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("case", [NEWBORN, BELOW, LEFT_BEHIND, COPY, GUARD_KILLED])
def test_watched_groups_end_with_a_killed_process(case: str) -> None:
    code = FRONT + "PAUSE_AFTER = 'print(flush=True); ' + PAUSE\n" + case + END
    front = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False
    )
    pids = list(map(int, front.stdout.split()))
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=30)
    for process in alive:
        process.kill()
    assert (front.returncode, bool(pids), alive) == (-signal.SIGKILL, True, [])


def test_the_guard_spares_forgotten_groups() -> None:
    code = FRONT + (
        "import psutil\n"
        "PAUSE_AFTER = 'print(flush=True); ' + PAUSE\n"
        "child = start(PAUSE_AFTER)\n"
        "guard.watch(child.pid)\n"
        "mine = [str(os.getpid())]\n"
        "found = psutil.process_iter(['cmdline'])\n"
        "guards = (p.pid for p in found if (p.info['cmdline'] or [])[-1:] == mine)\n"
        "print(child.pid, *guards)\n"
        "guard.forget(child.pid)\n"
    )
    front = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    child, guard = map(int, front.stdout.split())
    _, alive = psutil.wait_procs(
        [psutil.Process(guard)] if psutil.pid_exists(guard) else [], timeout=30
    )
    assert alive == []
    os.kill(child, signal.SIGKILL)  # it was there to be killed
