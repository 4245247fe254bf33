"""`llmctl tune`: its output and file, for any number of processes, and its refusals."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import samples
from commands import llmctl, printed, refused
from lean import without_capacity
from said import says

from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import BEHIND, Tuning
from toolkit.sched.policies import footnote

RECIPE = """\
name: test
model: {source: org/model, max_model_len: 512, kv_bytes_per_token: 4096, dtype: float32}
hardware: {device: cpu, name: any}
engine: {name: transformers}
workers: 2
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
sla: {ttft_p99_s: 2, e2e_p95_s: 8}
policy: {name: sequence, parameters: {batch_size: 1}}
tune: {trials: 6, windows: 2, held_out_windows: 2, window_s: 2, policies: [own]}
serve: {max_new_tokens: 128}
"""
BROKEN = (5,)
WRITTEN = (0, 5)  # with limits kept, and with limits broken


@pytest.fixture
def files(tmp_path, monkeypatch) -> Iterator[Path]:
    """As `whole`, for tests that ask for no capacity."""
    with without_capacity():
        yield stage(tmp_path, monkeypatch)


@pytest.fixture
def whole(tmp_path, monkeypatch) -> Path:
    return stage(tmp_path, monkeypatch)


def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe that has a poor policy, and its fit."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    samples.write_fit(Path("recipe.yaml"))
    Path("profile.json").unlink()
    rows = [
        {"timestamp": 25 * k, "input_length": 40 + 7 * k % 90, "output_length": 8 + 5 * k % 60}
        for k in range(900)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def tune(*words: str) -> int:
    return llmctl(f"tune recipe.yaml --trace trace.jsonl --jobs 1 {' '.join(words)}")


def tuned(words: str, codes: tuple[int, ...] = (0,)) -> Tuning:
    assert tune(words) in codes
    return read_file(Tuning, "tuning.json")


@pytest.mark.slow
def test_the_output_fits_80_columns_and_has_the_results(whole, capsys):
    assert tune("--policies slice,past-future") == 0
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    for said in (
        "each policy's best settings",
        "judged on the whole trace, 900 requests",
        "the limit that binds: ",
        "gain over the defaults: +",
        "capacity: ",
        "on 2 windows that the search did not see",
        "the best beats the defaults in 2 of them",
        "past-future *",
    ):
        assert said in out
    assert footnote(["past-future"], "transformers") in " ".join(out.split())
    assert "wrote tuning.json" in err
    assert not Path("tuning.json.partial").exists()


@pytest.mark.slow
def test_the_number_of_processes_changes_no_byte_of_the_file(whole):
    assert tune("--out one.json") == tune("--jobs 2 --out two.json") == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()


@pytest.mark.slow
def test_another_policy_that_keeps_the_limits_is_rendered(files, capsys):
    result = tuned("--policies slice")
    assert result.best.settings.policy == "slice"
    assert result.keeps_limits
    assert all(one.kept for one in result.limits)
    assert "beside the limits" in capsys.readouterr().out
    assert llmctl("render recipe.yaml --fit fit.json --tuning tuning.json") == 0
    plan = read_file(Plan, "plan.json")
    assert plan.settings.policy == "slice"
    assert plan.settings.parameters == result.best.settings.parameters
    assert plan.explained["slice_tokens"].source.startswith("trial ")


@pytest.mark.slow
def test_the_best_is_one_that_the_engine_runs_and_the_best_of_all_is_named(files, capsys):
    Path("recipe.yaml").write_text(RECIPE.replace("ttft_p99_s: 2", "ttft_p99_s: 0.2"))
    result = tuned("--policies slice,past-future --rate 60", BROKEN)
    assert result.best.settings.policy == "slice"
    assert result.alternatives.best_of_all == "past-future"
    assert "past-future" in capsys.readouterr().out
    words = "--fit fit.json --tuning tuning.json --force"
    assert llmctl(f"render recipe.yaml {words}") == 0
    assert read_file(Plan, "plan.json").settings.policy == "slice"


@pytest.mark.slow
def test_no_settings_within_the_limits_name_the_binding_limit_and_a_remedy(whole, capsys):
    tight = RECIPE.replace("batch_size: 1}", "batch_size: 8}")
    Path("recipe.yaml").write_text(tight.replace("ttft_p99_s: 2", "ttft_p99_s: 0.001"))
    assert tune("") == 5
    out, err = capsys.readouterr()
    result = read_file(Tuning, "tuning.json")
    assert not result.keeps_limits
    assert result.recommended.outcome.used[BEHIND] <= 1.0
    assert {one.name: (one.bound, one.limit, one.kept) for one in result.limits} == {
        "ttft_p99_s": ("at most", 0.001, False),
        "e2e_p95_s": ("at most", 8.0, True),
        "oom_percent": ("at most", 1.0, True),
        "behind_percent": ("at most", 5.0, True),
    }
    assert all(one.kept == (one.predicted <= one.limit) for one in result.limits)
    assert result.recommended.outcome.binding == "ttft_p99_s"
    assert result.recommended.outcome.used["ttft_p99_s"] > 1
    assert result.capacity.recommended_rps is None
    said = " ".join(out.split())
    assert says(said, "ttft_p99_s")
    assert "gain over the defaults" not in out
    error = next(line for line in err.splitlines() if line.startswith("error: "))
    assert says(error, "1 of 4", "ttft_p99_s", "0.001 s")


@pytest.mark.slow
def test_every_kind_of_limit_is_judged_by_the_recommendation(files, capsys):
    """A tuning that breaks limits is written and printed nevertheless."""
    extra = "tune: {max_evicted_percent: 5, min_attainment_percent: 99.9,"
    Path("recipe.yaml").write_text(RECIPE.replace("tune: {", extra))
    assert tune("--policies slice --json") == 5
    assert json.loads(capsys.readouterr().out) == json.loads(Path("tuning.json").read_text())
    assert not Path("tuning.json.partial").exists()
    result = read_file(Tuning, "tuning.json")
    told = {one.name: one for one in result.limits}
    attained = told["sla_attainment_lower_percent"]
    assert (attained.bound, attained.limit, attained.kept) == ("at least", 99.9, False)
    assert attained.predicted == result.recommended.metrics["sla_attainment_lower_percent"]
    assert list(told) == [
        "ttft_p99_s",
        "e2e_p95_s",
        "oom_percent",
        "evicted_percent",
        attained.name,
        "behind_percent",
    ]
    keys = (*list(told)[:4], "sla_attainment_percent", "behind_percent")
    shares = [result.recommended.outcome.used[key] for key in keys]
    assert [one.kept for one in result.limits] == [share <= 1 for share in shares]


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("--policies slic", ("tune.policies", "'slic'"), "'slice'"),
        (
            "--policies past-future-oracle",
            ("'past-future-oracle'",),
            "docs/explanation/policies.md",
        ),
    ],
)
def test_an_impossible_search_is_refused_before_anything_runs(files, words, named, remedy, capsys):
    error, *hints = refused(capsys, f"tune recipe.yaml --trace trace.jsonl {words}")
    assert says(error, *named)
    assert [says(hint, remedy) for hint in hints] == ([True] if remedy else [])
    assert not Path("tuning.json.partial").exists()


@pytest.mark.slow
def test_windows_fit_themselves_to_the_trace_and_say_so(files, capsys):
    Path("recipe.yaml").write_text(RECIPE.replace("window_s: 2", "window_s: 9"))
    result = tuned("--trials 2", WRITTEN)
    length = result.window_length
    assert length.seconds == length.longest_s < length.wished_s == 9
    assert result.request_rate_rps == pytest.approx(40.0), "the trace's own"
    [note] = [one for one in result.trace_notes if one.startswith("windows of ")]
    assert says(note, "9 s", "22.48 s", "40 requests/s")
    assert f"trace: {note}" in capsys.readouterr().err.splitlines()
    windows = [*result.search_windows, *result.held_out_windows]
    spans_s = [window.end_s - window.start_s for window in windows]
    assert spans_s == pytest.approx([length.seconds] * 4)
    inside = sum(window.requests for window in windows)
    assert length.covered_percent == pytest.approx(100 * inside / 900)


def first_rows(count: int) -> None:
    """Shorten the trace."""
    rows = Path("trace.jsonl").read_text().splitlines(keepends=True)
    Path("trace.jsonl").write_text("".join(rows[:count]))


@pytest.mark.parametrize(("count", "few"), [(60, True), (120, False)])
def test_few_requests_are_counted(files, count, few, capsys):
    first_rows(count)
    result = tuned("--trials 1 --rate 5", WRITTEN)
    assert result.judged.requests == count
    assert (f"only {count} requests" in capsys.readouterr().out) is few


@pytest.mark.slow
def test_a_trace_that_is_over_before_a_target_could_be_missed_is_refused(files, capsys):
    at_200 = "tune recipe.yaml --trace trace.jsonl --rate 200"  # it lasts 4.5 s then
    error, hint = refused(capsys, at_200)
    assert "e2e_p95_s, 8 s" in error
    assert " 112 requests/s" in hint
    assert not Path("tuning.json").exists()
    assert tune("--rate 112 --trials 1") in WRITTEN


@pytest.mark.slow
def test_a_load_is_a_multiple_of_the_capacity_of_the_recipes_settings(whole, capsys):
    Path("recipe.yaml").write_text(RECIPE.replace("batch_size: 1}", "batch_size: 8}"))
    result = tuned("--load 0.5 --trials 1")
    assert result.request_rate_rps == pytest.approx(0.5 * result.capacity.defaults_rps, rel=0.02)
    assert result.keeps_limits
    assert not tuned("--load 1.2 --trials 1", BROKEN).keeps_limits
    said = refused(capsys, "tune recipe.yaml --trace trace.jsonl --load 0.5 --rate 3")
    assert "--rate 3" in said[0]


@pytest.mark.slow
def test_a_tuning_with_nothing_to_gain_prints_that_instead_of_a_gain(files, capsys):
    better = RECIPE.replace("batch_size: 1}", "batch_size: 8}")
    Path("recipe.yaml").write_text(better.replace("window_s: 2", "window_s: 400"))
    assert tune("--rate 0.5") == 0
    said = " ".join(capsys.readouterr().out.split())
    result = read_file(Tuning, "tuning.json")
    assert result.keep_defaults
    assert result.recommended.metrics["sla_attainment_percent"] == 100.0
    assert says(said, "nothing", "0.5")
    assert "beats the defaults" not in said
    assert "gain over the defaults" not in said


@pytest.mark.slow
def test_a_fixed_concurrency_is_tuned_and_simulated_alike(files, capsys):
    made = tuned("--concurrency 8 --trials 3", WRITTEN)
    assert made.concurrency == 8
    assert made.capacity is None
    assert "behind_percent" not in {limit.name for limit in made.limits}
    words = "recipe.yaml --fit fit.json --trace trace.jsonl --tuning tuning.json"
    found = printed(capsys, f"simulate {words}")
    assert found["concurrency"] == 8
    for name in ("throughput_rps", "e2e_mean_s"):
        assert found[name] == made.recommended.metrics[name]


@pytest.mark.parametrize(
    "words",
    [
        "--concurrency 8 --rate 5",
        "--concurrency 8 --load 0.5",
        "--rate 5 --load 0.5",
        "--rate 0",
        "--rate 1e9",
        "--concurrency 0",
    ],
)
def test_contradicting_words_about_the_load_are_refused(files, capsys, words):
    assert refused(capsys, f"tune recipe.yaml --fit fit.json --trace trace.jsonl {words}")
    assert not Path("tuning.json").exists()
