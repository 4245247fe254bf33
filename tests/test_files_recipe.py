"""Recipes with mistakes: one line each, naming the key, the value and what is right."""

from pathlib import Path

import pytest

from toolkit.errors import InputError
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
    ("old", "new", "message"),
    [
        ("batch_sizes:", "batch_size:", (
            "profile.batch_size: unknown key; did you mean "
            "'batch_sizes'?"
        )),
        ("sla:", "slo:", "slo: unknown key; did you mean 'sla'?"),
        ("sla:", "max_model_len: 3\nsla:", (
            "max_model_len: unknown key; did you mean "
            "'model.max_model_len'?"
        )),
        ("sla:", "engine: {zzz: 1}\nsla:", "engine.zzz: unknown key; valid: "),
        ("ttft_p99_s: 2", "ttft_p99_ms: 2000", (
            "sla.ttft_p99_ms: 2000: targets are in seconds; write 'ttft_p99_s: "
            "2'"
        )),
        ("ttft_p99_s", "ttft_p99", (
            "sla.ttft_p99: 2: the unit is missing; write 'ttft_p99_s', in "
            "seconds"
        )),
        ("ttft_p99_s", "tfft_p99_s", (
            "sla.tfft_p99_s: 2: unknown target; did you mean "
            "'ttft_p99_s'?"
        )),
        ("ttft_p99_s: 2", "ttft_p99_s: -2", "sla.ttft_p99_s: -2: should be greater than 0"),
        ("ttft_p99_s: 2", "ttft_p99_s: .nan", "sla.ttft_p99_s: nan: should be a finite number"),
        ("[1, 2]", "[1, '2']", "profile.batch_sizes[1]: '2': should be a valid integer"),
        ("[1, 2]", "[1, true]", "profile.batch_sizes[1]: True: should be a valid integer"),
        ("[1, 2]", "[]", "profile.batch_sizes: a list of 0: List should have at least 1 item"),
        ("device: cpu", "device: tpu", "hardware.device: 'tpu': should be 'cpu' or 'cuda'"),
        (", name: any", "", "hardware.name: missing"),
        ("name: small", "name: Small One", "name: 'Small One': String should match pattern"),
        ("source: org/model", "source: random", (
            "model: model.source is 'random', so model.config needs "
            "'model_type'"
        )),
        ("input_lengths: [8]", "input_lengths: [65]", (
            "profile.input_lengths: 65 is too long; model.max_model_len "
            "is"
        )),
        ("name: small", "name: small\nschema_version: 2", "schema_version: 2: should be 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_remedy(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    error = problem(tmp_path, GOOD.replace(old, new))
    assert error.message.startswith(f"small.yaml: {message}")
    assert "\n" not in error.message


def test_many_mistakes_are_three_lines_and_a_count(tmp_path: Path) -> None:
    error = problem(tmp_path, GOOD + "a: 1\nb: 1\nc: 1\nd: 1\ne: 1\n")
    lines = error.message.splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("", "empty, not"), ("[1]", "a list, not a mapping"), ("3", "one value, not a mapping")],
)
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str, shown: str) -> None:
    assert shown in problem(tmp_path, text).message


def test_a_bare_name_is_a_shipped_recipe() -> None:
    assert load_recipe("tiny-llama-cpu").name == "tiny-llama-cpu"


def test_a_file_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny-llama-cpu").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_recipe("tiny-llama-cpu").name == "small"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("tiny-lama-cpu", "tiny-lama-cpu: no such recipe", "did you mean 'tiny-llama-cpu'?"),
        ("nowhere/tiny-llama-cpu.yaml", "no such file", "did you mean 'tiny-llama-cpu'?"),
        ("../nowhere", "no such file", "llmctl recipes lists those that ship"),
        ("nosuch", "nosuch: no such recipe", "llmctl recipes lists those that ship"),
        ("..", "a folder", ""),
        ("/dev/null", "a device or pipe", ""),
        ("Tiny", "neither a file nor a recipe's name", "names match"),
        ("", "neither a file nor a recipe's name", "names match"),
    ],
)
def test_a_missing_recipe_gives_a_hint(name: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        recipe_path(name)
    assert message in caught.value.message
    assert hint in caught.value.hint
