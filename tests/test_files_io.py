"""Workflow files: they read back as written, and record their inputs."""

import json
import os
import socket
from pathlib import Path

import pytest
import samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from said import says

from toolkit.errors import InputError, StaleError
from toolkit.files.fit import LAWS_FORMAT, Fit
from toolkit.files.io import check_writable, digest, head, read_file, write_file, write_text
from toolkit.files.profile import PrefillPoint, Profile
from toolkit.traces.write import TraceLog

RECIPE = """\
name: small  # a comment
model: {source: org/model, max_model_len: 64}
hardware: {device: cpu, name: any}
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
sla: {ttft_p99_s: 2}
"""


def profile(recipe: Path) -> Profile:
    return Profile(
        **head({"recipe": recipe}),
        recipe_name="small",
        workers=1,
        clock="wall",
        engine=samples.fit().engine,
        prefill=[],
        decode=[],
        slices=[],
        memory=[],
    )


@pytest.fixture
def chain(tmp_path: Path) -> dict[str, Path]:
    """recipe.yaml -> profile.json -> fit.json."""
    recipe = tmp_path / "recipe.yaml"
    measured = tmp_path / "profile.json"
    fit = tmp_path / "fit.json"
    recipe.write_text(RECIPE)
    write_file(profile(recipe), measured)
    write_file(samples.fit().model_copy(update=dict(head({"profile": measured}))), fit)
    return {"recipe": recipe, "profile": measured, "fit": fit}


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.floats(0.0, 1e6), max_size=20))
def test_every_float_survives_the_file(tmp_path: Path, seconds: list[float]) -> None:
    path = tmp_path / "profile.json"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    point = PrefillPoint(batch_size=1, input_length=8, seconds=seconds)
    written = profile(recipe).model_copy(update={"prefill": [point]})
    write_file(written, path)
    assert read_file(Profile, path) == written


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_path_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/plan\.json"):
        write_text(tmp_path / "file" / "plan.json", "x")
    with pytest.raises(InputError, match=r"file/plan\.json"):
        check_writable(tmp_path / "file" / "plan.json")


def test_a_file_that_is_missing_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_file(Fit, tmp_path / "fit.json")
    assert says(caught.value.message, "fit.json", "No such file")  # as the system says it
    assert says(caught.value.hint, "llmctl fit PROFILE")


def test_a_file_of_another_kind_is_named(chain: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"fit\.json.*\bfit\b.*\bprofile\b"):
        read_file(Profile, chain["fit"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"workers": "2"}, ("workers", "'2'", "integer")),
        ({"wrkers": 2}, ("wrkers", "'workers'")),
        ({"workers": float("nan")}, ("workers", "nan", "integer")),
    ],
)
def test_a_damaged_file_names_the_key(
    chain: dict[str, Path], change: dict[str, object], named: tuple[str, ...]
) -> None:
    chain["fit"].write_text(json.dumps(json.loads(chain["fit"].read_text()) | change))
    with pytest.raises(InputError) as caught:
        read_file(Fit, chain["fit"])
    assert says(caught.value.message, "fit.json", *named)


@pytest.mark.parametrize("found", [1, LAWS_FORMAT + 1, "3", None])
def test_a_file_of_another_format_is_refused_by_its_number(
    chain: dict[str, Path], found: object
) -> None:
    """Before anything else of it is read: its other keys may have changed, too."""
    content = json.loads(chain["fit"].read_text()) | {"schema_version": found, "gone_since": 1}
    chain["fit"].write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_file(Fit, chain["fit"])
    shown = "null" if found is None else repr(found)
    assert says(caught.value.message, "fit.json", f"format {shown}", f"format {LAWS_FORMAT}")
    assert says(caught.value.hint, "llmctl fit PROFILE")


def test_unchanged_inputs_are_accepted(chain: dict[str, Path]) -> None:
    fit = read_file(
        Fit, chain["fit"], inputs={"recipe": chain["recipe"], "profile": chain["profile"]}
    )
    assert fit.inputs["profile"] == digest(chain["profile"])


def test_a_changed_profile_makes_its_fit_stale(chain: dict[str, Path]) -> None:
    other = read_file(Profile, chain["profile"]).model_copy(update={"workers": 7})
    write_file(other, chain["profile"])
    with pytest.raises(StaleError) as caught:
        read_file(Fit, chain["fit"], inputs={"profile": chain["profile"]})
    assert says(caught.value.message, "fit.json", "profile.json")
    assert says(caught.value.hint, "llmctl fit PROFILE")


def test_another_profile_is_named(chain: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(StaleError, match=r"other\.json.*profile\.json"):
        read_file(Fit, chain["fit"], inputs={"profile": other})


def test_a_fit_knows_which_section_of_its_recipe_changed(chain: dict[str, Path]) -> None:
    chain["recipe"].write_text(RECIPE.replace("max_model_len: 64", "max_model_len: 63"))
    with pytest.raises(StaleError) as caught:
        read_file(Fit, chain["fit"], inputs={"recipe": chain["recipe"]})
    assert says(caught.value.message, "fit.json", "'model'", "recipe.yaml")
    assert says(caught.value.hint, "llmctl profile RECIPE", "llmctl fit PROFILE")


@pytest.mark.parametrize(
    "old_new",
    [("ttft_p99_s: 2", "ttft_p99_s: 3"), ("  # a comment", ""), ("sla:", "workers: 1\nsla:")],
)
def test_a_change_of_an_unmeasured_section_makes_no_fit_stale(
    chain: dict[str, Path], old_new: tuple[str, str]
) -> None:
    chain["recipe"].write_text(RECIPE.replace(*old_new))
    assert read_file(Fit, chain["fit"], inputs={"recipe": chain["recipe"]}).recipe_name == "test"


def test_a_file_without_a_recorded_role_is_stale(chain: dict[str, Path], tmp_path: Path) -> None:
    alone = tmp_path / "alone.json"
    write_file(samples.fit(), alone)
    with pytest.raises(StaleError, match=r"alone\.json.*\bprofile\b"):
        read_file(Fit, alone, inputs={"profile": chain["profile"]})


def test_a_folder_cannot_be_written_as_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in (".", "/", tmp_path):
        with pytest.raises(InputError, match="Is a directory"):
            write_text(place, "text")
        with pytest.raises(InputError, match="Is a directory"):
            check_writable(place)


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd"])
def test_an_open_pipe_is_written_to(folder: str) -> None:
    read_end, write_end = os.pipe()
    check_writable(f"{folder}/{write_end}")
    write_text(f"{folder}/{write_end}", "text")
    os.close(write_end)
    with open(read_end) as pipe:
        assert pipe.read() == "text"
    check_writable("/dev/null")
    write_text("/dev/null", "text")


def test_a_named_pipe_and_a_socket_are_refused_and_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "link", "socket"):
            with pytest.raises(InputError):
                check_writable(tmp_path / name)
            with pytest.raises(InputError):
                write_text(tmp_path / name, "text")
            with pytest.raises(InputError):
                TraceLog(tmp_path / name)
        assert (tmp_path / "pipe").is_fifo()
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "socket").is_socket()


def test_a_link_to_itself_is_refused_and_one_to_nothing_makes_its_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for refuse in (check_writable, lambda path: write_text(path, "text"), digest):
        with pytest.raises(InputError):
            refuse(tmp_path / "loop")
    (tmp_path / "far").symlink_to("folder/file")
    write_text(tmp_path / "far", "text")
    assert (tmp_path / "far").is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "text"


def test_a_full_disk_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")  # and the device must still be one
    with pytest.raises(InputError, match=r"full: .*No space left"):
        write_text(tmp_path / "full", "text")
    assert Path("/dev/full").is_char_device()


def test_behind_a_link_the_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("role", ["profile", "fit"])
def test_a_file_with_a_duplicate_key_is_refused(chain: dict[str, Path], role: str) -> None:
    text = chain[role].read_text()
    chain[role].write_text(text.replace("{", '{"schema_version": 1, ', 1))
    with pytest.raises(InputError, match=rf"{role}\.json.*'schema_version'"):
        read_file({"profile": Profile, "fit": Fit}[role], chain[role])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[" * 100_000, ()),
        (b'{"a": ' * 50_000, ()),
        (b'{"name": "\xff\xfe"}', ("11", "UTF-8")),
        (b"{}{", ("JSON",)),
    ],
)
def test_invalid_json_is_one_line(tmp_path: Path, content: bytes, named: tuple[str, ...]) -> None:
    (tmp_path / "fit.json").write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_file(Fit, tmp_path / "fit.json")
    assert says(raised.value.message, "fit.json", *named)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("number", [10**400, -(10**30), 1 << 64])
def test_a_number_beyond_calculation_is_one_line(number: int, tmp_path: Path) -> None:
    write_file(samples.fit(), tmp_path / "fit.json")
    text = (tmp_path / "fit.json").read_text()
    capacity = str(samples.fit().engine.capacity_tokens)
    (tmp_path / "fit.json").write_text(text.replace(f": {capacity}", f": {number}"))
    with pytest.raises(InputError, match=rf"fit\.json.*{str(number)[:19]}"):
        read_file(Fit, tmp_path / "fit.json")
