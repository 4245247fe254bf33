"""What all tests share.

Tests run plain Python, unless LLMCTL_COMPILED says otherwise: they patch methods, and coverage
counts lines, which compiled code does not allow. `make test` runs tests of whole commands with
compiled code where there is some, and `make quick-compiled` others.
"""

import os
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("LLMCTL_COMPILED", "0")
# Tests run beside each other on all processors: threads of libraries would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import certifi
import lean
import pytest
from hypothesis import HealthCheck, settings

import benchmarks.common  # noqa: F401  (it makes the engine `fake` known)
from toolkit import interrupts

pytest_plugins = ["lanes", "reword"]
END = "-----END CERTIFICATE-----"
BRIEF = 5.0  # times the longest target on waiting that a trace lasts where it is judged
STATE = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts the tests in the background has SIGINT ignored; the tests send it, so it
    must count.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # how long an example takes says how busy the machine is
    import lanes  # here: as a plugin it is imported after this file

    quick = config.option.markexpr == lanes.QUICK
    settings.register_profile(
        "patient",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=lanes.QUICK_EXAMPLES if quick else lanes.EXAMPLES,
    )
    settings.load_profile("patient")
    # files of tests need not survive a power cut, and thousands of waits for the disk take seconds
    os.fsync = lambda descriptor: None
    state = config.stash.setdefault(STATE, tempfile.TemporaryDirectory()).name
    # each client of HTTP reads the authorities that it trusts, and a hundred of them take 26 ms
    authority = Path(state, "authority.pem")
    authority.write_text("".join(certifi.contents().partition(END)[:2]))
    os.environ["SSL_CERT_FILE"] = str(authority)


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[STATE].cleanup()


@pytest.fixture(autouse=True)
def no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that ended a server of one test has not come in the next."""
    monkeypatch.setattr(interrupts, "_ctrl_c", interrupts._CtrlC())


@pytest.fixture
def short_chat(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped trace `chat-small` is its first 30 seconds: 600 requests in place of 3,000."""
    short = lean.shorter_traces(tmp_path_factory.mktemp("traces"))
    monkeypatch.setattr("toolkit.traces.types.FOLDER", short)


@pytest.fixture(autouse=True)
def brief_traces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate is judged on a tenth of the time that a verdict takes: plain Python is slow. Tests of
    how long that is are marked `whole_traces`.
    """
    if request.node.get_closest_marker("whole_traces") is None:
        monkeypatch.setattr("toolkit.tuning.capacity.LASTING", BRIEF)
        monkeypatch.setattr("toolkit.tuning.workload.LASTING", BRIEF)
