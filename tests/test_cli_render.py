"""`llmctl render`: the plan, and its explanation."""

from pathlib import Path

import pytest
import samples
from commands import llmctl, refused
from said import says

from toolkit.files.io import head, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Alternatives, Evaluation, JudgedPart, Limit, Tuning, TuningWindow

RECIPE = """\
name: test
model: {source: org/model, max_model_len: 512, kv_bytes_per_token: 4096, dtype: float32}
hardware: {device: cpu, name: any}
workers: 2
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
sla: {ttft_p99_s: 2}
policy: {name: slice, parameters: {slice_tokens: 64, min_interval_s: 0.5}}
"""
UNTUNED = "recipe.yaml --fit fit.json"
TUNED = f"{UNTUNED} --tuning tuning.json"
MADE_FROM = {"recipe": Path("recipe.yaml"), "fit": Path("fit.json")}


LIMITS = [
    Limit(name="ttft_p99_s", bound="at most", limit=2.0),
    Limit(name="oom_percent", bound="at most", limit=1.0),
]


def found(slice_tokens: int, ttft_p99_s: float) -> Evaluation:
    """Settings with which the target on TTFT, 2 s, is used so far."""
    parameters = {"slice_tokens": slice_tokens, "min_interval_s": 0.5, "interval_factor": 0.5}
    used = {"ttft_p99_s": ttft_p99_s / 2.0, "oom_percent": 0.0}
    return samples.evaluation("slice", parameters, {"goodput_rps": 3.25}, used)


def tuning(inputs: dict[str, Path], ttft_p99_s: float = 1.8, **changes: object) -> Tuning:
    window = TuningWindow(start_s=0, end_s=30, requests=90)
    fields = dict(
        **head(inputs),
        recipe_name="test",
        seed=0,
        sla={"ttft_p99_s": 2.0},
        workers=2,
        engine="transformers",
        alternatives=Alternatives(best_of_all=None, workers=None),
        request_rate_rps=3.0,
        trace_notes=[],
        search_windows=[window],
        held_out_windows=[window, window],
        trials=[found(64 + i, ttft_p99_s) for i in range(3)],
        defaults=found(64, ttft_p99_s),
        best=found(66, ttft_p99_s),
        gain_percent=12.5,
        keep_defaults=False,
        judged=JudgedPart(start_s=0, end_s=90, requests=270, of_requests=270),
        sensitivity=[],
    )
    fields |= changes
    recommended = fields["defaults" if fields["keep_defaults"] else "best"].outcome
    return Tuning(**{"limits": [one.of(recommended) for one in LIMITS]} | fields)


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """The working directory, with recipe.yaml, profile.json, fit.json and tuning.json, made from
    each other.
    """
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    samples.write_fit(Path("recipe.yaml"))
    write_file(tuning(MADE_FROM), "tuning.json")
    return tmp_path


def render(*words: str, tuned: bool = True) -> int:
    return llmctl(f"render {TUNED if tuned else UNTUNED} {' '.join(words)}")


def sources(plan: Plan) -> dict[str, str]:
    return {key: item.source for key, item in plan.explained.items()}


def test_the_best_of_the_tuning_is_planned_and_explained(files, capsys):
    assert render() == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    plan = read_file(Plan, "plan.json", MADE_FROM | {"tuning": Path("tuning.json")})
    assert plan.settings.parameters["slice_tokens"] == 66
    assert plan.outcome.metrics == {"goodput_rps": 3.25}
    explained = sources(plan)
    planned = {"policy", "workers", "predicted goodput_rps", *plan.settings.parameters}
    assert planned <= explained.keys()
    assert explained["slice_tokens"] == "trial 2 of 3: +12.5 % goodput"
    assert explained["min_interval_s"] == "recipe"
    assert explained["eager"] == "default of policy 'slice'"
    assert "whole trace" in explained["predicted goodput_rps"]


def test_a_tuning_that_found_nothing_keeps_the_recipes_policy(files):
    write_file(tuning(MADE_FROM, keep_defaults=True, gain_percent=-3.0), "tuning.json")
    assert render() == 0
    plan = read_file(Plan, "plan.json")
    assert plan.settings.parameters["slice_tokens"] == 64
    assert says(sources(plan)["policy"], "kept", "3")


def test_without_a_tuning_the_recipe_decides_and_nothing_is_predicted(files):
    assert render(tuned=False) == 0
    plan = read_file(Plan, "plan.json")
    assert (plan.settings.parameters["slice_tokens"], plan.outcome.metrics) == (64, {})
    assert sources(plan)["policy"] == "recipe, not tuned"


def test_a_changed_latency_target_makes_the_tuning_stale(files, capsys):
    Path("recipe.yaml").write_text(RECIPE.replace("ttft_p99_s: 2", "ttft_p99_s: 1"))
    error, hint = refused(capsys, f"render {TUNED}")
    assert says(error, "tuning.json", "'sla'", "recipe.yaml")
    assert says(hint, "llmctl tune RECIPE --fit FIT --trace TRACE")


def test_a_policy_that_the_engine_cannot_run_is_not_planned(files, capsys):
    best = samples.evaluation("past-future", {}, {"goodput_rps": 5.0}, {"ttft_p99_s": 0.5})
    write_file(tuning(MADE_FROM, best=best), "tuning.json")
    said = refused(capsys, f"render {TUNED}")
    assert says(said[0], "'past-future'", "'transformers'")
    assert not Path("plan.json").exists()
