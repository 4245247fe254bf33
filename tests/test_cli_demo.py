"""The whole demo with a model that computes nothing and short replays: commands, checks, result."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from commands import llmctl
from said import says
from samples import computes_nothing

from toolkit.cli import demo
from toolkit.cli.demo import Achieved, Held, as_typed, find_rate
from toolkit.errors import LimitsBrokenError
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Tuning, TuningWindow
from toolkit.traces.write import TraceLine, write_lines

RECIPE = computes_nothing(
    "small",
    config="decode_row_s: 0.002",
    tune="windows: 1, held_out_windows: 1, window_s: 2, draws: 0",
)


@pytest.mark.slow
def test_the_demo_compares_the_tuned_server_with_the_promise_and_prints_the_result(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(demo, "REPLAY_S", 0.5)
    monkeypatch.setattr(demo, "WARMUP_S", 0.2)
    monkeypatch.setattr(demo, "SPEED_S", 1.0)
    recipe = tmp_path / "small.yaml"
    trace = tmp_path / "trace.jsonl"
    out = tmp_path / "out"
    recipe.write_text(RECIPE, encoding="utf-8")
    write_lines([TraceLine(50 * k, 20 + k % 90, 3 + k % 20) for k in range(240)], trace)
    assert llmctl("demo", recipe, "--trace", trace, "--out", out, "--json") == 0
    printed, _ = capfd.readouterr()
    found = json.loads(printed)
    tuning, bench = (
        json.loads((out / f"{name}.json").read_text()) for name in ("tuning", "bench-tuned")
    )
    # a part of the rate that the recipe's own settings just keep their targets at
    assert found["tuned_rate_rps"] == tuning["request_rate_rps"] != 20
    assert bench["request_rate_rps"] == pytest.approx(found["request_rate_rps"], rel=1e-3)
    assert (out / "speed" / "bench.json").is_file()
    window = tuning["held_out_windows"][0]
    assert 0 < bench["requests"] <= window["requests"] + 2  # of the window that tune held out
    assert bench["lengths"] == "hidden"
    at_tuned = found["request_rate_rps"] == found["tuned_rate_rps"]
    held = {one["metric"]: one for one in found["promise"]}
    assert {"ttft_p99_s", "e2e_p95_s", "goodput_rps", "throughput_rps"} <= held.keys()
    for row in bench["targets"]:
        one = held[row["target"]]
        assert (one["limit"], one["measured"], one["kept"]) == (
            row["limit_s"],
            row["measured_s"],
            row["kept"],
        )
        if at_tuned:
            assert one["promised"] == pytest.approx(tuning["usage"][row["target"]] * row["limit_s"])
        else:
            assert one["promised"] is None
    goodput = held["goodput_rps"]
    recommended = tuning["defaults"] if tuning["keep_defaults"] else tuning["best"]
    promised = recommended["metrics"]["goodput_rps"] if at_tuned else None
    assert goodput["promised"] == promised
    assert (goodput["predicted"], goodput["measured"]) == (
        bench["predicted"]["goodput_rps"],
        bench["measured"]["goodput_rps"],
    )
    assert found["overload"]["throughput_rps"].keys() == {"sls", "scls"}
    sharing = found["sharing"]
    assert sharing["hit_percent"]["without"] == 0.0
    assert sharing["hit_percent"]["with"] > 80.0
    assert sharing["ttft_mean_s"]["with"] < sharing["ttft_mean_s"]["without"]
    assert Path(found["report"]).is_file()


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


def test_a_machine_as_fast_as_in_the_fit_gets_the_tuned_rate():
    machine = Machine(31.0 / demo.SURE, slowdown=1.05)
    seen = find_rate(30.0, machine.keeps)
    assert (seen.rate_rps, seen.at_tuned, seen.slowdown) == (30.0, True, 1.05)
    assert machine.tried == [30.0]


@pytest.mark.parametrize("keeps_rps", [10.0, 200.0])
def test_another_speed_gets_what_the_plan_keeps_then_with_a_margin(keeps_rps):
    machine = Machine(keeps_rps)
    seen = find_rate(30.0, machine.keeps)
    assert (seen.rate_rps, seen.at_tuned) == (pytest.approx(demo.SURE * keeps_rps), False)
    assert machine.tried == [30.0, pytest.approx(demo.SURE * keeps_rps)]
    assert says(seen.text, "1.00", f"{demo.SURE * keeps_rps:g}", "30")


def test_a_machine_that_is_slower_under_load_is_measured_at_the_rate_that_it_gets():
    machine = Machine(200.0, 60.0, 50.0)
    assert find_rate(10.0, machine.keeps).rate_rps == pytest.approx(demo.SURE * 50.0)
    assert machine.tried == pytest.approx([10.0, demo.SURE * 200.0, demo.SURE * 60.0])


def test_where_the_speed_never_settles_the_slowest_decides():
    machine = Machine(80.0, 5.0, 80.0, 5.5, 80.0)
    seen = find_rate(30.0, machine.keeps)
    assert len(machine.tried) == demo.TRIES
    assert seen.rate_rps == pytest.approx(demo.SURE * 5.0)


def test_where_no_rate_is_kept_at_that_speed_the_rate_is_slowed_as_the_batches_are():
    assert find_rate(30.0, Machine(None, slowdown=2.0).keeps).rate_rps == demo.SURE * 15.0


@pytest.mark.parametrize(
    ("rate", "requests", "span"),
    [
        (30.0, 3000, (10.0, 30.0)),
        (10.0, 3000, (30.0, 90.0)),
        (30.0, 150, (0.0, 20.0)),  # a trace of 5 s, which `tune` repeated
        (30.0, 900, (10.0, 30.0)),
        (30.0, 750, (5.0, 25.0)),
    ],
)
def test_the_first_replay_has_the_same_requests_at_any_rate(rate, requests, span):
    window = TuningWindow.model_construct(start_s=10.0, end_s=30.0)
    promised = Tuning.model_construct(request_rate_rps=30.0, held_out_windows=[window])
    words = demo._same_window(promised, rate, requests)
    given = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert given["--rate"] == rate
    assert (given["--start"], given["--start"] + given["--duration"]) == pytest.approx(span)


def achieved(kept: bool, tuned_rps: float = 30.0, late: Sequence[str] = ()) -> Achieved:
    promise = [
        Held("ttft_p99_s", 5.0, 3.6, 3.7, 3.9 if kept else 7.5, kept),
        Held("e2e_p95_s", 10.0, 6.1, 6.0, 6.2, True),
        Held("goodput_rps", None, 25.1, 24.9, 24.0, None),
    ]
    overload = {"throughput_rps": {"sls": 10.0, "scls": 22.4}}
    return Achieved(
        30.0, tuned_rps, 1.7, promise, overload, "out/report.html", 290.0, late=list(late)
    )


def test_one_sentence_has_the_result():
    assert says(achieved(kept=True).text, "30 requests/s", "24/s", "24.9", "2.24")
    assert says(achieved(kept=False).text, "ttft_p99_s")
    assert not says(achieved(kept=True).text, "1.70")


def test_the_result_names_a_slow_machine_and_a_late_client(capsys, tmp_path):
    slow = achieved(kept=True, tuned_rps=51.0, late=["bench-sls.json"])
    assert says(slow.text, "30 requests/s", "1.70", "51")
    assert says(slow.text, "bench-sls.json")
    demo._show(slow, tmp_path)
    told = capsys.readouterr().out
    assert "tune said" not in told  # it said nothing of this rate
    demo._show(achieved(kept=True), tmp_path)
    assert "tune said" in capsys.readouterr().out


def test_the_demo_continues_with_a_note_where_no_setting_keeps_the_limits(monkeypatch, tmp_path):
    ran: list[list[str]] = []

    class Ended:
        def __init__(self, code: int) -> None:
            self.code = code

        def wait(self, timeout: float | None = None) -> int:
            return self.code

        def poll(self) -> int:
            return self.code

        def terminate(self) -> None:
            """Nothing is left to end."""

    def start(line: list[str], **options: object) -> Ended:
        ran.append(line)
        return Ended(LimitsBrokenError.exit_code)

    monkeypatch.setattr(demo.subprocess, "Popen", start)
    with (tmp_path / "out").open("w") as out:
        stage = demo.Stages(out)
        assert (
            stage.llmctl("tune", "recipe", survives=LimitsBrokenError.exit_code)
            == LimitsBrokenError.exit_code
        )
        with pytest.raises(demo.typer.Exit) as ended:
            stage.llmctl("render", "recipe")
    assert ended.value.exit_code == LimitsBrokenError.exit_code
    assert [line[3] for line in ran] == ["tune", "render"]


def test_a_command_shows_a_shipped_recipe_by_its_name(tmp_path):
    assert as_typed(recipe_path("tiny-llama-cpu")) == "tiny-llama-cpu"
    assert as_typed(tmp_path / "mine.yaml") == str(tmp_path / "mine.yaml")
