"""The whole demo with a model that computes nothing and short replays: commands, checks, result."""

import json
from pathlib import Path

import pytest
from commands import llmctl
from said import says
from samples import computes_nothing

from toolkit.cli import demo
from toolkit.cli.demo import Achieved, Held, as_typed
from toolkit.errors import LimitsBrokenError
from toolkit.files.io import read_file
from toolkit.files.profile import Profile
from toolkit.files.shipped import recipe_path, shipped_profiles
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
    # the rate that the recipe's own settings just keep their targets at
    assert found["request_rate_rps"] == tuning["request_rate_rps"] != 20
    window = tuning["held_out_windows"][0]
    assert bench["requests"] == window["requests"]  # the window that tune held out, at its rate
    assert bench["lengths"] == "hidden"
    held = {one["metric"]: one for one in found["promise"]}
    assert {"ttft_p99_s", "e2e_p95_s", "goodput_rps", "throughput_rps"} <= held.keys()
    for row in bench["targets"]:
        one = held[row["target"]]
        assert (one["limit"], one["measured"], one["kept"]) == (
            row["limit_s"],
            row["measured_s"],
            row["kept"],
        )
        assert one["promised"] == pytest.approx(tuning["usage"][row["target"]] * row["limit_s"])
    goodput = held["goodput_rps"]
    recommended = tuning["defaults"] if tuning["keep_defaults"] else tuning["best"]
    assert goodput["promised"] == recommended["metrics"]["goodput_rps"]
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


def profiled(factors: list[float]) -> Profile:
    """The shipped profile with k-th samples that take `factors[k]` times as long."""
    shipped = read_file(Profile, shipped_profiles() / "tiny-llama-cpu" / "profile.json")
    points = {
        name: [
            point.model_copy(update={"seconds": [0.01 * factor for factor in factors]})
            for point in getattr(shipped, name)
        ]
        for name in ("prefill", "decode")
    }
    return shipped.model_copy(update=points)


def test_the_spread_of_a_machine_is_how_slow_it_was_in_a_tenth_of_its_profile():
    assert demo.spread(profiled([1.0] * 20)) == 1.0
    assert demo.spread(profiled([1.0] * 18 + [1.4, 1.6])) == pytest.approx(1.4)
    assert demo.spread(profiled([1.0] * 30 + [3.0])) == 1.0  # one moment is no habit
    assert demo.spread(profiled([])) == 1.0


def test_the_profile_that_ships_was_measured_on_a_steady_machine():
    shipped = read_file(Profile, shipped_profiles() / "tiny-llama-cpu" / "profile.json")
    assert 1.0 <= demo.spread(shipped) <= demo.STEADY


def achieved(kept: bool) -> Achieved:
    promise = [
        Held("ttft_p99_s", 5.0, 3.6, 3.7, 3.9 if kept else 7.5, kept),
        Held("e2e_p95_s", 10.0, 6.1, 6.0, 6.2, True),
        Held("goodput_rps", None, 25.1, 24.9, 24.0, None),
    ]
    return Achieved(
        30.0, promise, {"throughput_rps": {"sls": 10.0, "scls": 22.4}}, "out/report.html", 290.0
    )


def test_one_sentence_has_the_result():
    assert says(achieved(kept=True).text, "30 requests/s", "24/s", "24.9", "2.24")
    assert says(achieved(kept=False).text, "ttft_p99_s")


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
