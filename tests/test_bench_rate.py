"""The rate and the part of a replay: what a plan keeps at the machine's speed, and the window that
a tuning did not see.
"""

import json
from pathlib import Path

import pytest
import samples
from commands import llmctl
from said import says
from sse_server import serve_request, sse_server

from toolkit.bench import rates
from toolkit.bench.rates import find_rate, held_out_window
from toolkit.cli import bench
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning, TuningWindow
from toolkit.traces.generate import Arrivals, generate, parse_lengths
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.traces.windows import scale_rate
from toolkit.traces.write import TraceLine, write_lines

LOAD = 0.7


class Machine:
    """A machine on which a plan keeps so many requests per second, by the rate that it gets."""

    def __init__(self, *keeps_rps: float | None, slowdown: float = 1.0) -> None:
        self.keeps_rps = list(keeps_rps)
        self.slowdown = slowdown
        self.tried: list[float] = []

    def keeps(self, rate_rps: float) -> tuple[float, float | None]:
        self.tried.append(rate_rps)
        left = len(self.keeps_rps) > 1
        return self.slowdown, self.keeps_rps.pop(0) if left else self.keeps_rps[0]


def test_a_machine_as_fast_as_in_the_fit_gets_the_asked_rate():
    machine = Machine(31.0 / LOAD, slowdown=1.05)
    assert find_rate(30.0, LOAD, machine.keeps) == (30.0, 1.05)
    assert machine.tried == [30.0]


@pytest.mark.parametrize("keeps_rps", [10.0, 200.0])
def test_another_speed_gets_what_the_plan_keeps_then_with_a_margin(keeps_rps: float):
    machine = Machine(keeps_rps)
    rate_rps, _ = find_rate(30.0, LOAD, machine.keeps)
    assert rate_rps == pytest.approx(LOAD * keeps_rps)
    assert machine.tried == [30.0, pytest.approx(LOAD * keeps_rps)]


def test_a_machine_that_is_slower_under_load_is_measured_at_the_rate_that_it_gets():
    machine = Machine(200.0, 60.0, 50.0)
    assert find_rate(10.0, LOAD, machine.keeps)[0] == pytest.approx(LOAD * 50.0)
    assert machine.tried == pytest.approx([10.0, LOAD * 200.0, LOAD * 60.0])


def test_where_the_speed_never_settles_the_slowest_decides():
    machine = Machine(80.0, 5.0, 80.0, 5.5, 80.0)
    rate_rps, _ = find_rate(30.0, LOAD, machine.keeps)
    assert len(machine.tried) == rates.TRIES
    assert rate_rps == pytest.approx(LOAD * 5.0)


def test_where_no_rate_is_kept_at_that_speed_the_rate_is_slowed_as_the_batches_are():
    assert find_rate(30.0, LOAD, Machine(None, slowdown=2.0).keeps)[0] == LOAD * 15.0


def steady(rate_rps: float, requests: int) -> Trace:
    trace = generate(
        Arrivals(rate_rps, cv=0.0), requests / rate_rps, *[parse_lengths("fixed:8")] * 2, 0
    )
    return scale_rate(trace, rate_rps)


@pytest.mark.parametrize(
    ("rate_rps", "requests", "start_s", "end_s"),
    [
        (30.0, 3000, 10.0, 30.0),
        (10.0, 3000, 30.0, 90.0),
        (30.0, 150, 0.0, 20.0),  # a trace of 5 s, which `tune` repeated
        (30.0, 900, 10.0, 30.0),
        (30.0, 750, 5.0, 25.0),
    ],
)
def test_the_window_of_a_tuning_has_the_same_requests_at_any_rate(
    rate_rps: float, requests: int, start_s: float, end_s: float
):
    window = TuningWindow.model_construct(start_s=10.0, end_s=30.0)
    tuning = Tuning.model_construct(
        request_rate_rps=30.0, held_out_windows=[window], concurrency=None
    )
    begins_s, lasts_s = held_out_window(tuning, steady(rate_rps, requests))
    assert (begins_s, begins_s + lasts_s) == pytest.approx((start_s, end_s), abs=0.1)
    closed = tuning.model_copy(update={"concurrency": 4})
    with pytest.raises(InputError, match="--tuning"):
        held_out_window(closed, steady(rate_rps, requests))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    recipe = samples.recipe(sla={"ttft_p99_s": 1.0})
    write_file(make_plan(recipe, samples.fit(), None, {}), tmp_path / "plan.json")
    write_lines([TraceLine(10 * k, 20, 3) for k in range(60)], tmp_path / "trace.jsonl")
    return tmp_path / "plan.json"


def test_a_load_is_a_multiple_of_what_the_plan_keeps_at_the_speed_that_is_seen(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def answer(body: dict) -> bytes | None:
        server.batch_s = (server.batch_s[0] + 2.0, server.batch_s[1] + 1.0)
        return serve_request(body)

    slowdowns = []
    monkeypatch.setattr(
        bench, "_kept_rate", lambda plan, trace, slowdown: slowdowns.append(slowdown) or 50.0
    )
    words = ["--plan", plan, "--trace", plan.with_name("trace.jsonl"), "--warmup", 0.2]
    with sse_server(answer) as server:
        words += ["--url", server.url]
        assert llmctl("bench", *words, "--load", 0.8, "--duration", 0.3, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["request_rate_rps"] == pytest.approx(40.0)
    assert slowdowns == pytest.approx([2.0, 2.0])
    assert says(err, "2.00", "50 requests/s", "40 requests/s", "100")


@pytest.mark.slow
def test_the_rate_that_a_plan_keeps_falls_with_the_speed(plan: Path):
    planned = read_file(Plan, plan)
    trace = read_trace(plan.with_name("trace.jsonl"))[0]
    fitted, slow = (bench._kept_rate(planned, trace, slowdown) for slowdown in (1.0, 2.0))
    assert fitted is not None
    assert slow is not None
    assert slow < fitted


def test_a_load_needs_a_speed(plan: Path, capsys: pytest.CaptureFixture[str]):
    with sse_server() as server:
        words = ["--url", server.url, "--trace", plan.with_name("trace.jsonl"), "--load", 0.7]
        assert llmctl("bench", *words) == 2
        assert llmctl("bench", *words, "--plan", plan, "--warmup", 0) == 2
    assert says(capsys.readouterr().err, "--load", "--plan")
