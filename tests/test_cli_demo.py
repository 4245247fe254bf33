"""The whole demo with a model that computes nothing and short replays: commands, checks, result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from commands import llmctl
from said import says
from samples import computes_nothing

from toolkit.cli import demo
from toolkit.cli.demo import Achieved, Held, as_typed
from toolkit.errors import LimitsBrokenError
from toolkit.files.bench import BenchReport
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
    assert found["request_rate_rps"] <= found["tuned_rate_rps"]
    assert bench["request_rate_rps"] == pytest.approx(found["request_rate_rps"], rel=1e-3)
    assert (out / "speed" / "bench.json").is_file()
    window = tuning["held_out_windows"][0]
    assert bench["requests"] == window["requests"]  # the window that tune held out, at its rate
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


@dataclass
class Told:
    """What `_speed` is told: by a bench its slowdown, by `llmctl capacity` a rate."""

    slowdown: float
    capacity_rps: float | None
    words: list[object] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def capacity(self, *words: object) -> float | None:
        self.words += words
        return self.capacity_rps

    def say(self, text: str) -> None:
        self.said.append(text)

    def rate(self, monkeypatch: pytest.MonkeyPatch, tuned_rps: float) -> demo.Speed:
        promised = Tuning.model_construct(request_rate_rps=tuned_rps)
        report = BenchReport.model_construct(replay_slowdown=self.slowdown)
        monkeypatch.setattr(demo, "read_file", lambda *_: report)
        return demo._speed(self, promised, Path("speed.json"), ["capacity", "tiny"])


def test_a_fast_machine_gets_the_tuned_rate(monkeypatch):
    told = Told(slowdown=1.05, capacity_rps=40.0)
    assert told.rate(monkeypatch, 30.0) == demo.Speed(1.05, 30.0, True)
    assert told.words == ["capacity", "tiny", "--bench", Path("speed.json")]


def test_a_slow_machine_gets_what_the_plan_keeps_at_its_speed_with_a_margin(monkeypatch):
    told = Told(slowdown=2.5, capacity_rps=10.0)
    seen = told.rate(monkeypatch, 30.0)
    assert seen == demo.Speed(2.5, demo.SURE * 10.0, False)
    assert says(told.said[0], "2.50", "8", "30")


def test_where_no_rate_is_kept_at_that_speed_the_rate_is_slowed_as_the_batches_are(monkeypatch):
    seen = Told(slowdown=2.0, capacity_rps=None).rate(monkeypatch, 30.0)
    assert seen == demo.Speed(2.0, demo.SURE * 15.0, False)


@pytest.mark.parametrize(("rate", "span"), [(30.0, (10.0, 30.0)), (10.0, (30.0, 90.0))])
def test_the_first_replay_has_the_same_requests_at_any_rate(rate, span):
    window = TuningWindow.model_construct(start_s=10.0, end_s=30.0)
    promised = Tuning.model_construct(request_rate_rps=30.0, held_out_windows=[window])
    words = demo._same_window(promised, rate)
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
