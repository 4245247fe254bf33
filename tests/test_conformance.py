"""`llmctl vllm-check` without vLLM: what is compared, counted, kept and cited."""

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import samples
import vllm_tree

import toolkit
from benchmarks.engines.workloads import MAKERS, SHIPPED, cases_of, make_case
from toolkit.backends.vllm.conformance import run
from toolkit.backends.vllm.conformance.cases import Case, shipped_cases
from toolkit.backends.vllm.conformance.kinds import KINDS
from toolkit.backends.vllm.conformance.modelled import first_difference, passes_of_case
from toolkit.backends.vllm.conformance.results import (
    ComparedKind,
    Conformance,
    agreement,
    keep,
    last_compared,
    read_result,
    result_of,
    shipped_results,
)
from toolkit.backends.vllm.conformance.run import Loaded, compare, within
from toolkit.backends.vllm.touched import Installed
from toolkit.catalogue.classes import CLASSES
from toolkit.cli import main
from toolkit.cli.basis import agreement_notes
from toolkit.errors import EngineError

FULL = "full attention"


def row(differing: int = 0, classes: tuple[str, ...] = ()) -> ComparedKind:
    return ComparedKind(
        kind=FULL,
        classes=list(classes),
        scheduler="Scheduler",
        workloads=20,
        differing=differing,
        passes=1234,
        cited=True,
    )


def found(version: str = "0.99.0", *rows: ComparedKind, tool: str = "") -> Conformance:
    return Conformance(
        vllm=version,
        tool_version=tool or toolkit.__version__,
        date="2026-11-27",
        seconds=12.5,
        rows=list(rows or [row()]),
        missing={},
        flags=[],
        metrics=[],
    )


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "llmctl" / "vllm"


def python_of(folder: Path, version: str = "0.99.0", loaded: str = "") -> str:
    """A Python with a made-up vLLM, which gives another version of itself where it is loaded."""
    site = folder / "site"
    package = vllm_tree.write(site, version)
    (package / "__init__.py").write_text(f"__version__ = '{loaded or version}'\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{site}" exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A made-up vLLM that is not run; its schedulers plan as the simulator does."""
    there = Installed("0.99.0", vllm_tree.write(tmp_path, "0.99.0"))
    monkeypatch.setattr(run, "read_vllm", lambda *_: there)
    monkeypatch.setattr(run, "run_cases", agrees)
    return there


def agrees(python: str, cases: list) -> Loaded:
    """What vLLM's schedulers plan: as the simulator does."""
    return Loaded("0.99.0", Path(python), [passes_of_case(case) for case in cases])


def full(count: int, seed: int = 1000) -> list[Case]:
    return cases_of([FULL], count, seed)


def test_a_vllm_that_plans_alike_agrees(installed: Installed) -> None:
    result = compare(str(installed.folder), full(3))
    assert result.agrees
    assert [one.scheduler for one in result.rows] == ["Scheduler", "AsyncScheduler"]
    assert all((one.workloads, one.differing) == (3, 0) for one in result.rows)
    assert result.passes > 100
    assert "--block-size" in result.flags
    assert "vllm:num_preemptions" in result.metrics


def test_a_pass_that_differs_is_counted_and_named(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differs(python: str, cases: list) -> Loaded:
        loaded = deepcopy(agrees(python, cases))
        loaded.results[2][7]["free"] += 1
        return loaded

    monkeypatch.setattr(run, "run_cases", differs)
    result = compare(str(installed.folder), full(3, seed=5))
    assert not result.agrees
    assert [one.differing for one in result.rows] == [1, 0]
    assert result.rows[0].first == "workload 6, pass 7"


@pytest.mark.slow
def test_another_vllm_than_the_one_that_was_read_is_refused(tmp_path: Path) -> None:
    """As an overlay of files that Python does not load."""
    with pytest.raises(EngineError, match=r"0\.99\.0.*0\.32\.0"):
        compare(python_of(tmp_path, loaded="0.32.0"), full(1))


def test_kinds_whose_parts_are_missing_are_not_run(installed: Installed) -> None:
    assert installed.folder is not None
    scheduler = installed.folder / "v1/core/sched/scheduler.py"
    renamed = scheduler.read_text().replace("def finish_requests", "def end_requests")
    scheduler.write_text(renamed)
    result = compare(str(installed.folder), cases_of([FULL, "our policies inside"], 1))
    assert {one.kind for one in result.rows} == {FULL}
    assert len(result.missing) == 1
    assert "finish_requests" in next(iter(result.missing))


def test_kinds_that_a_release_schedules_by_other_rules_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Installed("0.30.0", vllm_tree.write(tmp_path, "0.30.0"))

    def ends_at_once(_: str, cases: list) -> Loaded:
        return Loaded("0.30.0", there.folder or Path(), [[]] * len(cases))

    monkeypatch.setattr(run, "read_vllm", lambda *_: there)
    monkeypatch.setattr(run, "run_cases", ends_at_once)
    whole = compare("python", cases_of(MAKERS, 1))
    drafts = {"drafts by ngram", "drafts by eagle", "drafts and groups"}
    assert set(whole.refused) == {"states", *drafts}
    assert not {one.kind for one in whole.rows} & set(whole.refused)


def test_workloads_of_a_kind_are_compared_without_what_a_release_schedules_by_other_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models with thresholds and groups have states."""
    there = Installed("0.31.0", vllm_tree.write(tmp_path, "0.31.0"))
    ran: list[Case] = []

    def notes(_: str, cases: list) -> Loaded:
        ran.extend(cases)
        return Loaded("0.31.0", there.folder or Path(), [[]] * len(cases))

    monkeypatch.setattr(run, "read_vllm", lambda *_: there)
    monkeypatch.setattr(run, "run_cases", notes)
    given = cases_of(["thresholds and groups"], 20)
    compare("python", given)
    with_states = [case for case in given if "state" in {one["kind"] for one in case["groups"]}]
    assert with_states
    assert len(ran) == len(given) - len(with_states) > 0


@pytest.mark.slow
def test_the_command_keeps_the_result_and_exits_by_it(
    tmp_path: Path,
    own_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("toolkit.backends.vllm.conformance.cases.shipped_cases", lambda: full(1))
    monkeypatch.setenv("LLMCTL_VLLM_PYTHON", python_of(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main.run(["vllm-check"])
    assert ended.value.code == 4
    kept = read_result(own_folder / "0.99.0.json")
    assert kept.vllm == "0.99.0"
    assert [row.differing for row in kept.rows] == [1, 1], "what cannot be run differs"
    assert "Error" in kept.rows[0].first
    assert FULL in capsys.readouterr().err


def test_a_verdict_cites_the_result_of_its_version() -> None:
    assert "not compared" in agreement("0.99.0")
    keep(found())
    assert agreement("0.99.0") == "the simulator agrees with vLLM 0.99.0 in 1,234 passes"
    assert agreement("0.99.0+cpu").endswith("1,234 passes")
    keep(found("0.99.0", row(3)))
    assert "3 of 20" in agreement("0.99.0")


def test_a_result_is_of_one_class_and_one_version_of_llmctl() -> None:
    keep(found("0.99.0", row(), row(classes=("windows",))))
    assert "agrees" in agreement("0.99.0", ["windows"])
    assert "not compared" in agreement("0.99.0", ["drafts"])
    assert "not compared" in agreement("0.99.0", ["windows", "drafts"])
    keep(found("0.99.0", row(), row(classes=("windows",)), row(2, classes=("windows", "drafts"))))
    assert "agrees" in agreement("0.99.0", ["windows"])
    assert "2 of 40" in agreement("0.99.0", ["windows", "drafts"])
    keep(found("0.99.0", tool="0.0.1"))
    assert result_of("0.99.0") is None
    assert "not compared" in agreement("0.99.0")


def test_a_fit_says_how_far_its_version_was_compared() -> None:
    fit = samples.paged_fit()
    measured = fit.engine.model_copy(update={"engine_version": "0.99.0"})
    assert "not compared" in agreement_notes(fit.model_copy(update={"engine": measured}))[0]
    assert agreement_notes(samples.fit()) == []


def test_the_shipped_results_agree_and_are_of_this_version() -> None:
    shipped = shipped_results()
    assert len(shipped) >= 6
    assert [one.vllm for one in shipped] == sorted(one.vllm for one in shipped)
    assert last_compared() == shipped[-1].vllm
    for one in shipped:
        assert one.tool_version == toolkit.__version__
        assert not one.missing
        assert not any(row.differing for row in one.of([]))
        assert "agrees" in agreement(one.vllm)


def test_every_kind_has_known_classes_and_workloads_that_ship() -> None:
    assert [kind.name for kind in KINDS] == list(MAKERS)
    assert all(set(kind.classes) <= CLASSES.keys() for kind in KINDS)
    shipped = shipped_cases()
    of_kind = [case["kind"] for case in shipped]
    assert all(of_kind.count(kind.name) == 2 * SHIPPED for kind in KINDS)
    some = [case for case in shipped if case["seed"] < 1002]
    assert some == cases_of(MAKERS, 2), "python -m benchmarks.engines.workloads --write"


def test_a_workload_has_no_settings_that_a_release_lacks() -> None:
    case = {"retention": 0, "groups": [{"kind": "state", "block": 8, "checkpoint": 1}]}
    assert within(case, Installed("0.30.0", None)) == case | {"version": "0.30.0"}
    assert within(case, Installed("0.29.1", None))["retention"] == 0
    assert within(case, Installed("0.28.3", None)) == {
        "version": "0.28.3",
        "retention": None,
        "groups": [{"kind": "state", "block": 8}],
    }


def test_differences_are_found_in_passes_and_in_their_number() -> None:
    passes = passes_of_case(make_case(3))
    assert first_difference(passes, passes) is None
    assert first_difference(passes, passes[:-1]) == len(passes) - 1
    assert first_difference([{"rows": []}, *passes], passes) == 0
