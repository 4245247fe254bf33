"""The suite's two lanes, and how a run on several processors is divided.

`make quick` leaves out the tests marked `slow`: those that start a process, and those that take
longer than half a second. A test that starts a process without the mark fails, so the mark cannot
be forgotten. A test that only takes long does not fail, since the machine may do other work: the
end of `make quick` names it. Files that import torch are marked as a whole: the import takes each
process of a run four seconds.

Of a test with many parameters, `make quick` runs a few cases, always the same, and it tries fewer
of Hypothesis' examples.

A run by pytest-xdist gives each of its workers whole files, so what a file's tests share is made
once. Files with slow tests go first, so no worker is left alone with one at the end.
"""

import asyncio
import gc
import multiprocessing.util
import os
import platform
import re
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

QUICK = "not slow"
WHOLE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)  # marks a file
LONG_S = 0.5
NAMED = 10  # at most, of those that took long
STARTS = {
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
}
# what a test must leave as it was
HANDLERS: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler}
# Minutes of commands that share only what is made once for all workers: each of these tests goes
# where there is room.
APART = "test_docs_commands.py"

COMPILED = os.environ.get("LLMCTL_COMPILED") == "1"
CASES = 6  # of a test with parameters, in `make quick`; compiled code gets all
# Of a Hypothesis test that does not say how many. CI has the same ones each time, and needs fewer.
EXAMPLES = 30 if os.environ.get("CI") else 60
QUICK_EXAMPLES = 25  # of these, in `make quick`


_started: list[str] = []  # by the test that runs
_took_s: defaultdict[str, float] = defaultdict(float)  # by tests that are not marked slow


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(f"{event} {arguments[1] if event == 'subprocess.Popen' else ''}".strip())


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin("lanes-watch"):
        platform.processor()  # it starts `uname -p` once in a process: not in a test
        config.pluginmanager.register(Watch(), "lanes-watch")
        for each in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) is signal.SIG_DFL:  # `nohup` ignores the second
                HANDLERS[each] = signal.SIG_DFL
        sys.addaudithook(_see)
        # jsonschema's optional check of IRIs: importing it takes a second, and no test needs it
        sys.modules["rfc3987_syntax"] = None


class Watch:
    """Reports tests that lack the mark, and those that leave handlers of signals."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _started.clear()
        with pytest.MonkeyPatch.context() as patch:
            # these start processes without an audit event, the second on a loop of uvloop
            patch.setattr(multiprocessing.util, "spawnv_passfds", _spawn)
            patch.setattr(asyncio, "create_subprocess_exec", _create)
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if _started and not item.get_closest_marker("slow"):
            pytest.fail(
                f"it starts a process, so mark it @pytest.mark.slow: {_started[0]}", pytrace=False
            )
        left = [number.name for number in HANDLERS if not _restored(number)]
        if left:  # the next test that sends one would wait for ever
            pytest.fail(f"it leaves a handler of {' and '.join(left)}", pytrace=False)
        return result


def _restored(number: signal.Signals) -> bool:
    """Whether a signal's handler is Python's own. It is afterwards."""
    return signal.signal(number, HANDLERS[number]) is HANDLERS[number]


_spawnv_passfds = multiprocessing.util.spawnv_passfds
_create_subprocess_exec = asyncio.create_subprocess_exec


def _spawn(path: Any, arguments: Any, passed: Any) -> int:
    _started.append(f"multiprocessing {arguments}")
    return _spawnv_passfds(path, arguments, passed)


async def _create(*words: Any, **options: Any) -> asyncio.subprocess.Process:
    _started.append(f"asyncio {words}")
    return await _create_subprocess_exec(*words, **options)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slow" not in report.keywords:
        _took_s[report.nodeid] += report.duration


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.markexpr != QUICK:
        return
    took_long = sorted((seconds, name) for name, seconds in _took_s.items() if seconds > LONG_S)[
        ::-1
    ]
    if took_long:
        terminalreporter.section(
            f"{len(took_long)} tests took longer than {LONG_S:g} s and are not marked slow"
        )
        for seconds, name in took_long[:NAMED]:
            terminalreporter.write_line(f"{seconds:5.1f} s  {name}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not import files that are marked as a whole; some load large libraries."""
    if config.option.markexpr != QUICK or collection_path.suffix != ".py":
        return None
    return bool(WHOLE.search(collection_path.read_text(encoding="utf-8"))) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the objects of imported libraries from garbage collection, which waits until then.

    There are hundreds of thousands of them, and looking through them again and again would take a
    fifth of the quick lane's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # when the tests marked slow are out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr == QUICK and not COMPILED:
        config.hook.pytest_deselected(items=_thin_out(items))
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path.name != APART, item.path not in slow))


def _thin_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave `CASES` of each test in `items`; returns the others."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chosen = {
        item
        for each in cases.values()
        for item in sorted(each, key=lambda item: zlib.crc32(item.nodeid.encode()))[:CASES]
    }
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    return left_out


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One for each processor, and one more where tests wait for other processes."""
    return min((os.cpu_count() or 1) + (config.option.markexpr != QUICK), 8)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        """Whole files, in the order in which they were collected."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return nodeid if file.endswith(APART) else file

    config.option.loadscopereorder = False
    return Files(config, log)
