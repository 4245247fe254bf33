"""Damaged files: a command that reads one ends in one line with its exit code, no traceback."""

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import test_report
import yaml
from commands import llmctl, refused
from mutations import mutated

from toolkit.catalogue.known import KNOWN
from toolkit.cli.arguments import open_recipe
from toolkit.errors import InputError

REPORT = "report plan.json --out page.html"
READS = {  # a file, and the commands that read it
    "recipe.json": [
        "simulate recipe.json --fit fit.json --trace trace.jsonl",
        "render recipe.json --fit fit.json --out planned.json",
    ],
    "profile.json": ["fit profile.json --out fitted.json"],
    "fit.json": [
        "simulate recipe.json --fit fit.json --trace trace.jsonl --policies slice",
        REPORT,
    ],
    "tuning.json": [
        "render recipe.json --fit fit.json --tuning tuning.json --out planned.json",
        REPORT,
    ],
    "plan.json": [REPORT, "render plan.json --target systemd --out rendered"],
    "bench.json": [REPORT],
    "trace.jsonl": ["trace inspect trace.jsonl", "trace convert trace.jsonl converted.jsonl"],
    "log.csv": ["trace inspect log.csv"],
    "log.json": ["trace inspect log.json"],
    "config.json": ["recipe new config.json --gpu h200"],
}
CODES = {0, 2, 3, 4, 5}
TRACE = [
    {"timestamp": 100 * k, "input_length": 20 + k, "output_length": 5 + k % 3, "hash_ids": [0, k]}
    | ({"session": k % 4, "think_ms": 30} if k % 2 else {})
    for k in range(40)
]
LOG = [
    {
        "started_at": f"2026-01-01T00:00:{k:02}Z",
        "usage": {"prompt_tokens": 9 + k, "completion_tokens": 4},
    }
    for k in range(40)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The content of a folder with every kind of file, each made from the ones before."""
    folder = tmp_path_factory.mktemp("base")
    test_report.folder.__wrapped__(folder)  # type: ignore[attr-defined]
    test_report.make_tuning(folder)
    test_report.make_bench(folder, "bench.json", 1.0)
    rows = [json.dumps(row) for row in TRACE]
    (folder / "trace.jsonl").write_text("\n".join(rows))
    (folder / "log.json").write_text(json.dumps(LOG))
    cells = [f"{k / 3},{20 + k},{k % 7},ok" for k in range(40)]
    (folder / "log.csv").write_text("\n".join(["time,prompt_tokens,output_tokens,x", *cells]))
    (folder / "config.json").write_text(json.dumps(dict(KNOWN["llama-3.1-8b"].config)))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tracebacks(base: dict[str, bytes], folder: Path, name: str, seeds: range) -> Iterator[str]:
    """Mutations of a file that end in another way than one line."""
    os.chdir(folder)
    for seed in seeds:
        for other, content in base.items():
            Path(other).write_bytes(content)
        rng = Random(f"{name} {seed}")
        Path(name).write_bytes(mutated(base[name], rng))
        command = rng.choice(READS[name])
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                code = llmctl(command)
        except Exception as error:  # noqa: BLE001  (each is what is looked for)
            yield f"{name} {seed}: {command}: {type(error).__name__}: {error}"
            continue
        errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        if code not in CODES or (code == 2 and not errors):
            yield f"{name} {seed}: {command}: exit code {code}"


@pytest.mark.parametrize("first", range(0, 12, 4))
@pytest.mark.parametrize("name", READS)
def test_a_damaged_file_ends_in_one_line(
    base: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(tracebacks(base, tmp_path, name, range(first, first + 4))) == []


@pytest.mark.parametrize("size", [0, -1, 2**53, 10**9])
def test_a_profile_of_an_impossible_batch_is_refused_by_name(
    base: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    size: int,
) -> None:
    """A law has a table of all sizes up to it: of 2^53, one of 128 PiB."""
    monkeypatch.chdir(tmp_path)
    profile = json.loads(base["profile.json"])
    profile["slices"][0]["batch_size"] = size
    Path("profile.json").write_text(json.dumps(profile))
    assert "slices[0].batch_size" in refused(capsys, "fit profile.json --out fitted.json")[0]


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_damaged_yaml_is_refused_or_read(
    base: dict[str, bytes], tmp_path: Path, first: int
) -> None:
    file = tmp_path / "file.yaml"
    recipe = json.loads(base["recipe.json"])
    for seed in range(first, first + 20):
        rng = Random(seed)
        file.write_text(yaml.safe_dump(recipe))
        content = mutated(file.read_bytes() if seed % 2 else json.dumps(recipe).encode(), rng)
        file.write_bytes(content)
        with contextlib.suppress(InputError):
            open_recipe(file)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e-320, 1e308])
def test_a_profile_of_an_impossible_time_is_refused_by_name(
    base: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = json.loads(base["profile.json"])
    profile["decode"][0]["seconds"][0] = seconds
    Path("profile.json").write_text(json.dumps(profile))
    assert "decode" in refused(capsys, "fit profile.json --out fitted.json")[0]


def test_a_long_value_does_not_fill_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate unit-step --trace chat-small --policies", "x" * 50_000)
    assert all(len(line) < 1100 for line in refused(capsys, *words))
