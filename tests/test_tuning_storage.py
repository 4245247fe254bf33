"""Evaluations in a database (SQLite, and a PostgreSQL server where there is one), reused after an
interruption.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import optuna
import psycopg
import pytest
import samples
from test_cli_tune import files, tune
from test_tuning import trace
from test_tuning_early import Interrupted

from toolkit.errors import InputError
from toolkit.tuning.evaluate import EvaluationSetup, Task, make_world
from toolkit.tuning.executor import InProcessRunner, JournalFile, Remembering, collect
from toolkit.tuning.studies import Studies

pytestmark = pytest.mark.slow

__all__ = ["files"]
CANARY = "canary/7f3a:@"
ESCAPED = "canary%2F7f3a%3A%40"


def programs() -> Path | None:
    """Where PostgreSQL's programs are: Debian keeps them out of the PATH."""
    found = shutil.which("initdb")
    beside = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return Path(found).parent if found else beside[-1].parent if beside else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A PostgreSQL server on loopback that asks for a password; its URL."""
    where = programs()
    if where is None:
        pytest.skip("PostgreSQL's server is not installed")
    as_user: list[str] = []
    if os.geteuid() == 0:  # it refuses to run as root
        if shutil.which("setpriv") is None:
            pytest.skip("PostgreSQL does not run as root, and there is no setpriv")
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    folder = Path(tempfile.mkdtemp(prefix="llmctl-postgres-"))
    data = folder / "data"
    password = folder / "password"
    password.write_text(CANARY)
    if as_user:
        for path in (folder, password):
            os.chown(path, 65534, 65534)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = f"--auth=scram-sha-256 --username=tuner --pwfile={password} --no-sync --encoding=UTF8"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    subprocess.run([*as_user, where / "initdb", "-D", data, *options.split()], check=True, **quiet)
    settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    running = subprocess.Popen(
        [*as_user, where / "postgres", "-D", data, *settings.split()], **quiet
    )
    try:
        url = f"postgresql://tuner:{ESCAPED}@127.0.0.1:{port}/postgres"
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert running.poll() is None
        yield url
    finally:
        # with SIGTERM it would wait until all connections are closed
        running.send_signal(signal.SIGINT)
        running.wait()
        shutil.rmtree(folder)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/trials.db"
    return str(request.getfixturevalue("server"))


def bench() -> EvaluationSetup:
    world = make_world(samples.recipe(), samples.fit())
    return EvaluationSetup(world, [trace(50)], {"ttft_p99_s": 2.0}, "search, 2 workers")


def test_kept_evaluations_are_reused_and_give_the_same_result(url: str) -> None:
    tasks = [
        Task(bench(), "slice", {"slice_tokens": 8 * k, "max_min": bool(k % 2)}) for k in range(1, 5)
    ]
    with pytest.raises(KeyboardInterrupt):
        collect(Remembering(Interrupted(2), Studies(url, "test", "one")), tasks)
    again = Remembering(InProcessRunner(), Studies(url, "test", "one"))
    assert again.remembered == 2
    assert collect(again, tasks) == collect(InProcessRunner(), tasks)
    assert Remembering(InProcessRunner(), Studies(url, "test", "two")).remembered == 0
    everything = Remembering(Interrupted(2), Studies(url, "test", "one"))
    assert collect(everything, tasks) == collect(InProcessRunner(), tasks)


def test_optuna_can_load_the_studies(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    (found,) = collect(
        Remembering(InProcessRunner(), Studies(url, "test", "one")),
        [Task(bench(), "slice", {"slice_tokens": 8})],
    )
    storage = optuna.storages.RDBStorage(url)
    (name,) = optuna.get_all_study_names(storage)
    assert name.startswith("llmctl test ")
    assert name.endswith(" search, 2 workers")
    (trial,) = optuna.load_study(study_name=name, storage=storage).trials
    assert trial.value == found.score
    assert trial.params["slice.slice_tokens"] == 8


def test_the_result_has_the_same_bytes_with_a_storage(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--out", "without.json") == 0
    assert tune("--out", "with.json", "--storage", "sqlite:///trials.db") == 0
    assert tune("--out", "again.json", "--storage", "sqlite:///trials.db") == 0
    assert (
        Path("without.json").read_bytes()
        == Path("with.json").read_bytes()
        == Path("again.json").read_bytes()
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://me:{}@host/db", "'mysql'"),
        ("{}", "'...'"),
        ("postgresql://me:{}@host:port/db", "URL"),
        (
            "postgresql://me:{}@127.0.0.1:1/db",
            "storage postgresql+psycopg://me:***@127.0.0.1:1/db: ",
        ),
        (
            "postgresql://127.0.0.1:1/db?user=me&password={}",
            "storage postgresql+psycopg://127.0.0.1:1/db: ",
        ),
        ("sqlite:////nowhere/trials.db", "unable to open database file"),
    ],
)
def test_no_password_is_shown(
    url: str, said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--storage", url.format(ESCAPED)) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert "canary" not in out + err
    assert "Traceback" not in err


def test_a_wrong_password_is_not_shown(server: str) -> None:
    with pytest.raises(InputError, match="password authentication failed") as caught:
        Studies(server.replace("7f3a", "7f3b"), "test", "one")
    assert "canary" not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__suppress_context__


def test_a_lost_database_is_one_line(tmp_path: Path) -> None:
    studies = Studies(f"sqlite:///{tmp_path}/trials.db", "test", "one")
    (tmp_path / "trials.db").unlink()
    (tmp_path / "trials.db").touch()
    with pytest.raises(InputError, match=r"sqlite:///.*trials\.db"):
        collect(Remembering(InProcessRunner(), studies), [Task(bench(), "slice")])


GOOD = (
    b'["k", {"policy": "slice", "parameters": {}, "metrics": {"goodput_rps": 1.0}}, '
    b'{"ttft_p99_s": 0.5}]\n'
)
DAMAGED = [
    b"\x00" * 64,
    b"\xff\xfe no UTF-8",
    b"[" * 100_000,
    b"[1]",
    b"",
    b'{"key":"slice/7","result":{"seconds":[1.0]}}',  # of profile's journal
    GOOD[:-1].replace(b'"k"', b"5"),
    GOOD[:-1].replace(b'{"ttft_p99_s": 0.5}', b'"x"'),
    GOOD[:-1].replace(b"0.5", b'"fast"'),
    GOOD[:-1].replace(b'{"goodput_rps": 1.0}', b"{}"),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_line_of_the_memo_is_said_in_one_line_and_kept(
    damaged: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "memo"
    for content, number in (
        (b'"mine"\n' + GOOD + damaged + b"\n" + GOOD, 3),
        (damaged + b"\n" + GOOD, 1),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=rf"memo: line {number}\b"):
            JournalFile(path, "mine")
        assert path.read_bytes() == content


def test_a_line_of_the_memo_that_a_kill_has_torn_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "memo"
    for content, found in ((b'"mi', []), (b'"mine"', []), (b'"mine"\n' + GOOD + GOOD[:30], ["k"])):
        path.write_bytes(content)
        assert list(JournalFile(path, "mine").known) == found
        assert path.read_bytes() == b'"mine"\n' + GOOD * len(found)


def test_a_damaged_trial_of_a_database_is_said_in_one_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/trials.db"
    collect(
        Remembering(InProcessRunner(), Studies(url, "test", "one")),
        [Task(bench(), "slice", {"slice_tokens": 8})],
    )
    storage = optuna.storages.RDBStorage(url)
    (name,) = optuna.get_all_study_names(storage)
    optuna.load_study(study_name=name, storage=storage).add_trial(
        optuna.trial.create_trial(value=1.0, user_attrs={"llmctl_key": "k", "llmctl_outcome": [1]})
    )
    with pytest.raises(InputError, match=r"trial 1 .*damaged"):
        Studies(url, "test", "one")
