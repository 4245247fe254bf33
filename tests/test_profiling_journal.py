"""The journal: results survive, and results of different conditions do not mix."""

import pytest
from said import says
from samples import ENVIRONMENT
from synthetic_profiles import FACTS

from toolkit.errors import InputError
from toolkit.files.profile import FailedPoint, MemoryPoint, SlicePoint
from toolkit.profiling.measure import Journal, JournalConditions, PointVisit

NOW = JournalConditions(
    tool_version="1", recipe={"model": "aa", "profile": "bb"}, environment=ENVIRONMENT, engine=FACTS
)
RESULTS = {
    "prefill/1/16/0": PointVisit(seconds=[0.1, 1e-9, 1 / 3]),
    "prefill/64/256": FailedPoint(
        kind="prefill", batch_size=64, length=256, reason="out of memory"
    ),
    "memory/64/16": MemoryPoint(input_length=64, steps=16, largest_ok=3, smallest_oom=None),
    "slice/7": SlicePoint(batch_size=2, input_length=16, steps=16, seconds=0.25),
}

DAMAGED = (
    b"\x00" * 64,
    b"\xff\xfe no UTF-8",
    b"[" * 200_000,
    b'{"key":' * 100_000,
    # of tune's journal
    b'["k", {"policy": "slice", "parameters": {}, "metrics": {}}, {"ttft_p99_s": 1.0}]',
    b"",
)


@pytest.fixture
def path(tmp_path):
    with Journal(tmp_path / "profile.json.partial", NOW) as journal:
        for key, result in RESULTS.items():
            journal.put(key, result)
    return tmp_path / "profile.json.partial"


def test_results_are_read_back(path):
    with Journal(path, NOW) as journal:
        assert journal.results == RESULTS
        assert journal.set_aside == ""


@pytest.mark.slow
def test_a_torn_line_is_cut_off(path):
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for torn in range(1, last + 1):
        path.write_bytes(whole[:-torn])
        with Journal(path, NOW) as journal:
            assert journal.results.keys() == RESULTS.keys() - {"slice/7"}
            journal.put("slice/8", RESULTS["slice/7"])
        with Journal(path, NOW) as journal:
            assert journal.results.keys() == RESULTS.keys() - {"slice/7"} | {"slice/8"}


def test_everything_after_a_damaged_line_is_measured_again(path):
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in DAMAGED:
        content = b"".join([*lines[:2], damage + b"\n", *lines[2:]])
        path.write_bytes(content)
        with Journal(path, NOW) as journal:
            assert list(journal.results) == ["prefill/1/16/0"]
            assert says(journal.set_aside, "line 3")
        assert path.with_name("profile.json.partial.old").read_bytes() == content


def test_a_torn_first_line_is_written_again(path):
    first = path.read_bytes().splitlines(keepends=True)[0]
    for torn in (first[:-1], first[:20], b"\x00" * 4096):
        path.write_bytes(torn)
        with Journal(path, NOW) as journal:
            journal.put("slice/8", RESULTS["slice/7"])
        with Journal(path, NOW) as journal:
            assert (list(journal.results), journal.set_aside) == (["slice/8"], "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"recipe": {"model": "aa", "profile": "cc"}}, "'profile' of the recipe"),
        ({"recipe": {"model": "aa", "profile": "bb", "engine": "dd"}}, "'engine' of the recipe"),
        ({"tool_version": "2"}, "llmctl (1, now 2)"),
        ({"environment": ENVIRONMENT.model_copy(update={"cpu_count": 64})}, "the machine"),
        (
            {"environment": ENVIRONMENT.model_copy(update={"packages": {"torch": "2"}})},
            "torch (none, now 2)",
        ),
        ({"engine": FACTS.model_copy(update={"device": "H100"})}, "device CPU (here H100)"),
        (
            {"engine": FACTS.model_copy(update={"capacity_tokens": 9000})},
            "what the engine says of itself",
        ),
    ],
)
def test_results_of_other_conditions_are_set_aside(path, change, said):
    old = path.read_bytes()
    with Journal(path, NOW.model_copy(update=change)) as journal:
        assert journal.results == {}
        assert said in journal.set_aside
    assert path.with_name("profile.json.partial.old").read_bytes() == old


def test_a_slightly_changed_budget_is_the_same_engine(path):
    hair = FACTS.model_copy(update={"capacity_tokens": 8190, "kv_budget_bytes": 8190 * 4096})
    with Journal(path, NOW.model_copy(update={"engine": hair})) as journal:
        assert journal.results == RESULTS


def test_only_one_process_at_a_time(path):
    with Journal(path, NOW), pytest.raises(InputError, match="llmctl profile"):
        Journal(path, NOW)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/profile\.json\.partial"):
        Journal(tmp_path / "file" / "profile.json.partial", NOW)


@pytest.mark.parametrize(
    ("device", "platform", "resumes"),
    [
        ("NVIDIA H200", "Linux-4.4.0-x86_64-with-glibc2.39", True),
        ("NVIDIA H200", "Linux-6.18.44-gpu-x86_64-with-glibc2.36", False),
        ("NVIDIA H200", "Linux-4.4.0-aarch64-with-glibc2.39", False),
        ("cpu", "Linux-4.4.0-x86_64-with-glibc2.39", False),
    ],
    ids=["another kernel", "another libc", "another architecture", "on a CPU"],
)
def test_results_of_a_gpu_go_on_under_another_kernel(tmp_path, device, platform, resumes):
    then = "Linux-6.18.44-gpu-x86_64-with-glibc2.39"
    environment = ENVIRONMENT.model_copy(update={"device": device, "platform": then})
    path = tmp_path / "profile.json.partial"
    with Journal(path, NOW.model_copy(update={"environment": environment})) as journal:
        journal.put("slice/7", RESULTS["slice/7"])
    now = environment.model_copy(update={"platform": platform})
    with Journal(path, NOW.model_copy(update={"environment": now})) as journal:
        assert bool(journal.results) is resumes
        assert journal.set_aside == ("" if resumes else "changed since: the machine")
