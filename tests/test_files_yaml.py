"""YAML as recipes may use it."""

from pathlib import Path

import pytest

from toolkit.errors import InputError
from toolkit.files.strict import MAX_YAML_BYTES, load_yaml


def load(folder: Path, text: str | bytes) -> object:
    file = folder / "recipe.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_yaml(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no", "no"), ("on", "on"), ("1:30", "1:30"), ("2024-01-01", "2024-01-01"), ("010", 10),
        ("1_000", "1_000"),
        ("1e-3", 0.001), ("-.5", -0.5), ("7", 7), ("+7", 7), ("7.", 7.0), ("9" * 19, 1e19),
        ("true", True), ("~", None), ("null", None),
        ("'7'", "7"), ("", None),
    ],
)  # fmt: skip
def test_scalars_are_read_as_yaml_1_2_does(tmp_path: Path, text: str, expected: object) -> None:
    actual = load(tmp_path, f"key: {text}\n")
    assert actual == {"key": expected}
    assert isinstance(actual, dict)
    assert type(actual["key"]) is type(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: duplicate key 'a', first on line 1"),
        ("a:\n  b: 1\n  b: 1\n", "line 3, column 3: duplicate key 'b', first on line 2"),
        ("a: &x 1\n", "line 1, column 4: anchor &x"),
        ("a: *x\n", "line 1, column 4: alias *x"),
        ("a: !!python/object:os.system x\n", "line 1, column 4: "),
        ("a: !local x\n", "tag !local"),
        ("1: x\n", "key 1: keys must be text"),
        ("[a]: x\n", "keys must be text"),
        ("[" * 50_000, "nested more than"),
        ("a: 1\n---\na: 2\n", "line 2, column 1: "),
        ("a: [1\n", "line 2, column 1: "),
        ("\ta: 1\n", "line 1, column 1: "),
        ("a: \x00\n", "character 3"),
        ('a: "\\ud800"\n', "half a surrogate pair"),
        (b"a: \xff\n", "byte 3"),
        (b"#" * (MAX_YAML_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_forbidden_yaml_is_named_with_line_and_column(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert problem in caught.value.message
    assert caught.value.message.startswith("recipe.yaml: ")
    assert "\n" not in caught.value.message


def test_a_folder_is_not_a_document(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        load_yaml(tmp_path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    assert load(tmp_path, b"\xef\xbb\xbfa: 1\n") == {"a": 1}
