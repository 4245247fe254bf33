"""The verdict, the plan and the page say that requests were scaled to fit the model."""

import json
import re
from pathlib import Path

import pytest
import samples
from commands import llmctl
from lean import without_capacity
from said import says

from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import ScaledLengths, Scaling, Tuning
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.traces.windows import prepare

RECIPE = """\
name: test
model:
  {source: org/model, max_model_len: 512, kv_bytes_per_token: 4096, dtype: float32,
  config: {CONFIG}}
hardware: {device: cpu, name: any}
engine: {name: transformers}
workers: 2
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
sla: {ttft_p99_s: 2}
policy: {name: sequence, parameters: {batch_size: 4}}
tune: {trials: 3, window_s: 10, load: 0.8}
serve: {max_new_tokens: 128}
"""


def lengths(divisor: float, limit: int) -> ScaledLengths:
    return ScaledLengths(
        limit_tokens=limit, mean_tokens=50.0,
        divisor=divisor, clipped=0, scaled_mean_tokens=50.0 / divisor,
    )  # fmt: skip


def scaling(prompts: float, outputs: float = 1.0, context: int | None = None) -> Scaling:
    return Scaling(
        requests=9, max_model_len=512, max_new_tokens=128, model_context=context,
        prompts=lengths(prompts, 384), outputs=lengths(outputs, 128),
    )  # fmt: skip


def write_trace(shortest: int) -> None:
    rows = [
        {"timestamp": 250 * k, "input_length": shortest + k % 300, "output_length": 8 + k % 60}
        for k in range(400)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a trace of long prompts, a recipe that cuts them, and its fit."""
    monkeypatch.chdir(tmp_path)
    config = "model_type: llama, max_position_embeddings: 8192"
    Path("recipe.yaml").write_text(RECIPE.replace("CONFIG", config))
    samples.write_fit(Path("recipe.yaml"))
    write_trace(3000)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "last"),
    [
        (scaling(2.0), None),
        (scaling(4.0), "max_model_len: 512 limits the prompts: raise"),
        (scaling(4.0, context=512), "max_model_len: 512 limits the prompts: the model takes no"),
        (scaling(4.0, context=8192), "max_model_len: 512 limits the prompts: raise"),
        (scaling(1.0, 3.0), "max_new_tokens: 128 limits the outputs"),
    ],
)
def test_beyond_a_divisor_of_two_the_warnings_say_what_limits_the_lengths(
    given: Scaling, last: str | None
) -> None:
    warnings = given.warnings()
    if last is None:
        assert warnings == []
    else:
        assert "trace's own requests" in warnings[0]
        assert warnings[-1].startswith(last)


def test_the_model_s_own_context_comes_from_the_recipe() -> None:
    whole = read_trace(trace_path("chat-small"))[0]
    for context in (None, 4096):
        config = {"model_type": "llama"} | ({"max_position_embeddings": context} if context else {})
        model = {"source": "random", "config": config, "max_model_len": 512}
        prepared = prepare(whole, samples.recipe(model=model))
        assert prepared.scaling is not None
        assert prepared.scaling.model_context == context


@pytest.mark.slow
def test_the_verdict_the_plan_and_the_page_have_the_warning(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["--fit", "fit.json"]
    assert llmctl("tune", "recipe.yaml", *fit, "--trace", "trace.jsonl", "--jobs", "1") == 0
    out, err = capsys.readouterr()
    assert "divided by 8.5" in err.splitlines()[0]
    verdict = re.sub(r"\s+", " ", out[out.index("warning: ") :])
    assert "divided by 8.5" in verdict
    cuts = "max_model_len: 512 limits the prompts: raise model.max_model_len, up to 8,192"
    assert f"warning: {cuts}" in verdict
    tuning = read_file(Tuning, "tuning.json")
    assert tuning.scaling is not None
    assert tuning.scaling.prompts.divisor == pytest.approx(8.58, abs=0.01)
    assert tuning.scaling.summary() in tuning.trace_notes

    assert llmctl("render", "recipe.yaml", *fit, "--tuning", "tuning.json") == 0
    plan = read_file(Plan, "plan.json")
    assert "requests" in plan.explained
    assert plan.explained["requests"].value == tuning.changes == tuning.scaling.changes()
    assert cuts in plan.explained["requests"].source
    assert tuning.changes in plan.explained["predicted goodput_rps"].source
    assert llmctl("render", "plan.json", "--target", "systemd") == 0
    (unit,) = Path("systemd").glob("*.service")
    assert cuts in unit.read_text()

    assert llmctl("report", "plan.json", "--out", "report.html") == 0
    page = Path("report.html").read_text()
    assert cuts in page, "in the verdict"


@pytest.mark.slow
@without_capacity()
def test_requests_that_fit_give_no_warning(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(20)
    words = ["--trace", "trace.jsonl", "--jobs", "1"]
    assert llmctl("tune", "recipe.yaml", "--fit", "fit.json", *words) == 0
    err = capsys.readouterr().err
    assert says(err.splitlines()[0], "unchanged")
    words = ["--fit", "fit.json", "--tuning", "tuning.json"]
    assert llmctl("render", "recipe.yaml", *words) == 0
    assert "requests" not in read_file(Plan, "plan.json").explained
