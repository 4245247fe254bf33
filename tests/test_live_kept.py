"""The keeper beside a running deployment: what it changes, on which server, and when the others
follow.
"""

from dataclasses import dataclass, field

import pass_logs
import pytest
import samples
from said import says
from test_gateway import fake_plan_of

from toolkit.cli.output import note
from toolkit.endpoints.settings import HeldLease, LiveSetting, LiveState
from toolkit.live import kept
from toolkit.live.keep import KeepRules, Step
from toolkit.live.kept import KeepOrder, KeptTuned

ROWS = "max_num_seqs"
BOUNDS = {ROWS: (1.0, 64.0)}


@dataclass
class Control:
    """In the place of `SettingsClient`: a front before these servers; of one server without a
    name, the server itself.
    """

    rows: dict[str, int]
    url: str = "http://front"
    lease: HeldLease | None = None
    told: list[str] = field(default_factory=list)

    def get(self) -> LiveState:
        first = next(iter(self.rows.values()), 0)
        names = [name for name in self.rows if name]
        return LiveState(
            [LiveSetting(ROWS, first, 8, 1, 64)],
            self.lease,
            replicas={name: {ROWS: self.rows[name]} for name in names},
            urls={name: f"http://replica-{name}" for name in names},
        )

    def set(self, settings, why="", replica="") -> LiveState:
        for name in [replica] if replica else [*self.rows]:
            self.rows[name] = settings[ROWS]
        return self.get()

    def tell(self, word) -> LiveState:
        self.told.append(word)
        return self.get()


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The URLs of servers that were asked for their counters."""
    urls: list[str] = []

    def counts(target) -> dict[str, float]:
        urls.append(target.url)
        return {}

    monkeypatch.setattr(kept, "counts_or_none", counts)
    return urls


@pytest.fixture
def steps(monkeypatch) -> list[Step]:
    """What the keeper decides, one after the other; and what it was told to be the settings."""
    coming: list[Step] = []
    monkeypatch.setattr(kept.Keeper, "step", lambda *_: coming.pop(0))
    return coming


def keeping(tmp_path, control: Control, said: list[str], *, dry=False, replica="0") -> KeptTuned:
    path = tmp_path / "passes.jsonl"
    pass_logs.write(path, pass_logs.passes(pass_logs.requests(20, 20.0)))
    plan = fake_plan_of(samples.paged_fit())
    order = KeepOrder(plan, path, True, KeepRules(BOUNDS), dry=dry, replica=replica)
    return KeptTuned(order, control, said.append)


@pytest.mark.slow
def test_its_process_says_that_no_server_answers_and_ends(tmp_path, capfd):
    plan = fake_plan_of(samples.paged_fit())
    order = KeepOrder(plan, tmp_path / "none", True, KeepRules(BOUNDS), every_s=0.01)
    process = kept.KeeperProcess(order, "http://127.0.0.1:9", "", note)
    process.start()
    said = ""
    while "no answer" not in said:
        said += capfd.readouterr().err
    process.stop()
    assert not process.is_running


def change(rows: int) -> Step:
    return Step("change", f"{ROWS} 8 -> {rows}", {ROWS: rows})


def test_one_server_first_and_the_others_when_it_was_good(tmp_path, asked, steps):
    control = Control({"0": 8, "1": 8, "2": 8})
    said: list[str] = []
    one = keeping(tmp_path, control, said)
    steps += [change(32), Step("watch", "watched"), Step("good", "kept"), Step("keep", "kept")]
    one.step(1010.0)
    assert control.rows == {"0": 32, "1": 8, "2": 8}
    one.step(1020.0)
    assert control.rows == {"0": 32, "1": 8, "2": 8}
    one.step(1030.0)
    assert control.rows == {"0": 32, "1": 32, "2": 32}
    assert [says(line, "all replicas", f"{ROWS}=32") for line in said] == [True]
    one.step(1040.0)
    assert len(said) == 1
    assert set(asked) == {"http://replica-0"}


def test_what_was_worse_reaches_no_other_server(tmp_path, asked, steps):
    control = Control({"0": 8, "1": 8})
    said: list[str] = []
    one = keeping(tmp_path, control, said)
    steps += [change(32), Step("back", "worse", {ROWS: 8}), Step("keep", "kept")]
    one.step(1010.0)
    one.step(1020.0)
    one.step(1030.0)
    assert control.rows == {"0": 8, "1": 8}
    assert not said


def test_a_trial_of_the_operator_s_stays_where_it_is(tmp_path, asked, steps):
    control = Control({"0": 8, "1": 8})
    one = keeping(tmp_path, control, [])
    steps += [change(32), Step("good", "kept"), Step("keep", "kept"), Step("keep", "kept")]
    one.step(1010.0)
    one.step(1020.0)
    control.rows["0"] = 16
    one.step(1030.0)
    assert control.rows == {"0": 16, "1": 32}


def test_nothing_is_decided_while_the_first_server_starts_again(tmp_path, asked, steps):
    control = Control({"1": 8})
    assert keeping(tmp_path, control, []).step(1010.0).kind == "wait"
    assert control.rows == {"1": 8}


def test_a_dry_run_changes_no_server(tmp_path, asked, steps):
    control = Control({"0": 8, "1": 8})
    one = keeping(tmp_path, control, [], dry=True)
    steps += [change(32), Step("good", "kept")]
    assert one.step(1010.0).settings == {}
    one.step(1020.0)
    assert control.rows == {"0": 8, "1": 8}


def test_a_single_server_is_its_own_first(tmp_path, asked, steps):
    control = Control({"": 8})
    one = keeping(tmp_path, control, [], replica="")
    steps += [change(32), Step("good", "kept")]
    one.step(1010.0)
    one.step(1020.0)
    assert control.rows == {"": 32}
    assert set(asked) == {"http://front"}


def test_while_a_search_runs_nothing_is_changed(tmp_path, asked, steps):
    control = Control({"": 8}, lease=HeldLease("a search", 60.0))
    assert keeping(tmp_path, control, [], replica="").step(1010.0).kind == "wait"
    assert control.rows == {"": 8}
