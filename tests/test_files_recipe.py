"""Recipes with mistakes: one line each, naming the key, the value and what is right."""

from pathlib import Path

import pytest
from said import says

from toolkit.errors import InputError
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path

GOOD = """\
name: small
model: {source: org/model, max_model_len: 64}
hardware: {device: cpu, name: any}
profile:
  batch_sizes: [1, 2]
  input_lengths: [8]
  cached_lengths: [8]
  memory_lengths: [8]
sla: {ttft_p99_s: 2}
"""


def problem(folder: Path, text: str) -> InputError:
    file = folder / "small.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load_recipe(file)
    return caught.value


def test_a_recipe_is_loaded_with_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(GOOD)
    recipe = load_recipe(file)
    assert (recipe.profile.batch_sizes, recipe.sla, recipe.workers) == (
        [1, 2],
        {"ttft_p99_s": 2.0},
        1,
    )


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("batch_sizes:", "batch_size:", ("profile.batch_size", "'batch_sizes'")),
        ("sla:", "slo:", ("slo", "'sla'")),
        ("sla:", "max_model_len: 3\nsla:", ("max_model_len", "'model.max_model_len'")),
        ("sla:", "engine: {zzz: 1}\nsla:", ("engine.zzz", "joining")),
        ("ttft_p99_s: 2", "ttft_p99_ms: 2000", ("sla.ttft_p99_ms: 2000", "'ttft_p99_s: 2'")),
        ("ttft_p99_s", "ttft_p99", ("sla.ttft_p99: 2", "'ttft_p99_s'")),
        ("ttft_p99_s", "tfft_p99_s", ("sla.tfft_p99_s: 2", "'ttft_p99_s'")),
        ("ttft_p99_s: 2", "ttft_p99_s: -2", ("sla.ttft_p99_s: -2", "0")),
        ("ttft_p99_s: 2", "ttft_p99_s: .nan", ("sla.ttft_p99_s: nan",)),
        ("[1, 2]", "[1, '2']", ("profile.batch_sizes[1]: '2'", "integer")),
        ("[1, 2]", "[1, true]", ("profile.batch_sizes[1]: True", "integer")),
        ("[1, 2]", "[]", ("profile.batch_sizes", "0", "1")),
        ("device: cpu", "device: tpu", ("hardware.device: 'tpu'", "'cpu'", "'cuda'")),
        (", name: any", "", ("hardware.name",)),
        ("name: small", "name: Small One", ("name: 'Small One'",)),
        ("source: org/model", "source: random", ("'random'", "model.config", "'model_type'")),
        (
            "input_lengths: [8]",
            "input_lengths: [65]",
            ("profile.input_lengths", "65", "model.max_model_len"),
        ),
        ("name: small", "name: small\nschema_version: 2", ("schema_version: 2", "1")),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(
    tmp_path: Path, old: str, new: str, named: tuple[str, ...]
) -> None:
    error = problem(tmp_path, GOOD.replace(old, new))
    assert says(error.message, "small.yaml", *named)
    assert "\n" not in error.message


def test_many_mistakes_are_three_lines_and_a_count(tmp_path: Path) -> None:
    error = problem(tmp_path, GOOD + "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\n")
    lines = error.message.splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("(and 2 more)")


@pytest.mark.parametrize("text", ["", "[1]", "3"])
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str) -> None:
    error = problem(tmp_path, text)
    assert says(error.message, "small.yaml")
    assert says(error.hint, "`name:`", "docs/reference/recipe.md")


def test_a_file_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-llama-cpu").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny-llama-cpu").name == "small"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("tiny-lama-cpu", "'tiny-llama-cpu'"),
        ("nowhere/tiny-llama-cpu.yaml", "'tiny-llama-cpu'"),
        ("../nowhere", "llmctl recipes"),
        ("nosuch", "llmctl recipes"),
        ("..", ""),
        ("/dev/null", ""),
        ("Tiny", "[a-z0-9]"),
        ("", "[a-z0-9]"),
    ],
)
def test_a_missing_recipe_gives_a_hint(name: str, remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_path(name)
    assert name in caught.value.message
    assert remedy in caught.value.hint


PLAIN = """
name: plain
model: {source: org/model, max_model_len: 512, kv_bytes_per_token: 4096, dtype: bfloat16}
hardware: h200
engine: {name: ENGINE}
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
"""


@pytest.mark.parametrize(
    ("engine", "policy", "name"),
    [
        ("vllm", "", "vllm"),
        ("vllm", "policy: {parameters: {max_num_seqs: 64}}", "vllm"),
        ("vllm", "policy: {name: past-future}", "past-future"),
        ("vllm", "policy: {name: slice}", "slice"),
        ("rebatch", "", "slice"),
        ("transformers", "", "slice"),
    ],
)
def test_a_recipe_without_a_policy_has_the_engine_s(
    tmp_path: Path, engine: str, policy: str, name: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(PLAIN.replace("ENGINE", engine) + policy)
    recipe = load_recipe(file)
    assert recipe.policy.name == name
    assert recipe.policy.parameters == ({"max_num_seqs": 64} if "seqs" in policy else {})
    again = Recipe.model_validate(recipe.model_dump(exclude_unset=True))
    assert again == recipe
    named = "name" in policy.replace("parameters", "")
    assert ("name" in recipe.policy.model_fields_set) == named  # a plan says whether it was named
