"""`llmctl fit` and `llmctl profile`: what they write, print, and exit with."""

import json

import pytest
from commands import llmctl as run
from said import says
from synthetic_profiles import LAW, make_profile, make_rounds

from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_file
from toolkit.files.profile import Profile


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file(make_profile(noise=0.05), "profile.json")
    return tmp_path


def test_fit_writes_the_laws_of_its_profile(folder, capsys):
    assert run("fit", "profile.json") == 0
    laws = laws_from_fit(read_file(Fit, "fit.json", inputs={"profile": "profile.json"}))
    assert laws.latency.prefill_s(4, 64) > 0
    assert "wrote fit.json" in capsys.readouterr().err


def test_fit_prints_errors_in_80_columns(folder, capsys):
    run("fit", "profile.json")
    shown = capsys.readouterr().out
    parts = ("prefill", "decode", "slice", "memory:", "zeta", "token", "N 32")
    assert all(word in shown for word in ("median", "p95", "worst", *parts))
    assert max(map(len, shown.splitlines())) <= 80


def with_rounds(**truth) -> Profile:
    return make_profile(noise=0.05).model_copy(update={"rounds": make_rounds(LAW, **truth)})


def test_fit_writes_and_prints_the_laws_of_rounds_and_swaps(folder, capsys):
    write_file(with_rounds(noise=0.02), "profile.json")
    assert run("fit", "profile.json") == 0
    fit = read_file(Fit, "fit.json", inputs={"profile": "profile.json"})
    laws = laws_from_fit(fit)
    assert laws.rounds.round_s > 0.0
    assert laws.round_memory.usable_tokens == min(110 * 65, 28 * 257)
    assert laws.swap is not None
    captured = capsys.readouterr()
    for word in ("round", "join", "leave", "grow", "swap", "GB/s"):
        assert word in captured.out
    assert max(map(len, captured.out.splitlines())) <= 80
    assert "rounds: the held-out" not in captured.err


def test_fit_warns_of_rounds_that_no_law_explains(folder, capsys):
    write_file(with_rounds(noise=1.5), "profile.json")
    assert run("fit", "profile.json") == 0
    assert "rounds" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_says_that_a_law_is_far_off(folder, capsys):
    profiles = {
        "noisy.json": make_profile(noise=0.5, seed=2),
        "close.json": make_profile(noise=0.01),
    }
    said = {}
    for name, profile in profiles.items():
        write_file(profile, name)
        assert run("fit", name) == 0
        said[name] = [
            line for line in capsys.readouterr().err.splitlines() if line.startswith("decode")
        ]
    assert said["close.json"] == []
    assert says(said["noisy.json"][0], "%", "quieter", "repeats")


def test_fit_prints_one_json_object(folder, capsys):
    run("fit", "profile.json", "--json")
    assert Fit.model_validate(json.loads(capsys.readouterr().out)) == read_file(Fit, "fit.json")


RECIPE = """
name: fake
model:
  {source: random, config: {model_type: fake}, dtype: float32, tokenizer: bytes, max_model_len: 512}
hardware: {device: cpu, name: none}
engine: {name: fake, kv_cache_memory_mib: 2}
profile:
  {batch_sizes: [1, 64], input_lengths: [16, 64], cached_lengths: [16], memory_lengths: [64],
   repeats: 1, slices: 2,
   sequences: 2}
"""


@pytest.mark.slow
def test_profile_writes_a_profile_and_leaves_no_journal(folder, capsys):
    (folder / "fake.yaml").write_text(RECIPE)
    assert run("profile", "fake.yaml", "--out", "new.json") == 0
    shown = capsys.readouterr()
    assert len(read_file(Profile, "new.json", inputs={"recipe": "fake.yaml"}).slices) == 2
    assert {path.name for path in folder.iterdir()} == {"fake.yaml", "new.json", "profile.json"}
    assert says(shown.err, "1 point", "2048")
    assert says(shown.err, "5 points", "34 measurements")
    assert "memory edge" in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
