"""A tuning that breaks limits: `render` refuses it, others warn and show the broken limits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orders
import pytest
import samples
from commands import llmctl
from said import says
from test_cli_render import RECIPE, tuning

from benchmarks.common.serving import Server, fake_plan
from toolkit.cli.serve import Announcement
from toolkit.deploy.plan import UNTUNED, make_plan
from toolkit.deploy.render import TARGETS, render_target
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Limit, Outcome, Tuning, breaks, recipe_limits
from toolkit.report.material import gather
from toolkit.report.page import report
from toolkit.server.options import ServerOptions
from toolkit.server.status import facts_of

BROKEN = ("1 of 2", "ttft_p99_s", "31.7 s", "2 s")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a recipe, its fit, and a tuning with a best result that breaks
    the TTFT target.
    """
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    samples.write_fit(Path("recipe.yaml"))
    write_tuning(31.7)
    return tmp_path


def write_tuning(ttft_p99_s: float, **changes: object) -> None:
    made_from = {"recipe": Path("recipe.yaml"), "fit": Path("fit.json")}
    write_file(tuning(made_from, ttft_p99_s, **changes), "tuning.json")


GIVEN = ("recipe.yaml", "--fit", "fit.json", "--tuning", "tuning.json")


def refused(capsys: pytest.CaptureFixture[str], which: str, *words: str) -> None:
    """The command ends with 2, one line that names the limit, one that names the remedy, and no
    output.
    """
    capsys.readouterr()
    assert llmctl(*words) == 2
    out, err = capsys.readouterr()
    error, hint = err.splitlines()
    assert says(error, which, *BROKEN)
    assert says(hint, "--rate", "--force")
    assert out == ""


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_render_refuses_it_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path().iterdir())
    refused(capsys, "tuning.json", "render", *GIVEN)
    refused(capsys, "tuning.json", "render", *GIVEN, "--target", "compose")
    assert set(Path().iterdir()) == before


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_an_allowed_broken_limit_stays_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert llmctl("render", *GIVEN, "--force") == 0
    out, err = capsys.readouterr()
    [warning] = [line for line in err.splitlines() if line.startswith("warning: tuning.json: ")]
    assert says(warning, *BROKEN)
    assert "llmctl serve plan.json" in err
    plan = read_file(Plan, "plan.json")
    assert [(one.name, one.limit, one.predicted, one.kept) for one in plan.limits] == [
        ("ttft_p99_s", 2.0, 31.7, False),
        ("oom_percent", 1.0, 0.0, True),
    ]
    told = plan.explained["limits"]
    assert told.value == "1 of 2 kept"
    assert says(told.source, "1 of 2", "ttft_p99_s", "31.7 s")
    assert says(plan.explained["policy"].source, "trial 2 of 3", "limits")
    assert "% goodput" not in "".join(one.source for one in plan.explained.values())
    assert "1 of 2 kept" in out
    assert llmctl("render", "plan.json", "--target", "local") == 0
    [warning] = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert says(warning, "plan.json", *BROKEN)


def broken_plan(made: Plan) -> Plan:
    """The plan, with its TTFT target missed by far."""
    target_s = made.recipe.sla["ttft_p99_s"]
    used = made.outcome.used | {"ttft_p99_s": 31.7 / target_s}
    return made.model_copy(update={"outcome": made.outcome.model_copy(update={"used": used})})


@pytest.mark.parametrize("target", TARGETS)
def test_the_files_of_every_target_warn(target: str, tmp_path: Path) -> None:
    plan = broken_plan(orders.of_target(target, tmp_path))
    files = render_target(target, orders.order(plan))
    assert says(next(iter(files.values())), "Warning", "break 1 of", "31.7 s")


@pytest.mark.parametrize("target", TARGETS)
def test_files_of_a_plan_that_keeps_its_limits_say_so(target: str, tmp_path: Path) -> None:
    files = render_target(target, orders.order(orders.of_target(target, tmp_path)))
    assert "# All limits are predicted to be kept.\n" in next(iter(files.values()))


@pytest.mark.slow
def test_a_running_server_shows_the_limits_that_its_plan_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = fake_plan(tmp_path)
    used = {one.name: 0.5 for one in plan.limits}
    used["ttft_p99_s"] = 31.7 / plan.recipe.sla["ttft_p99_s"]
    outcome = Outcome(metrics={}, used=used)
    write_file(plan.model_copy(update={"outcome": outcome}), tmp_path / "plan.json")
    with Server(tmp_path / "plan.json") as server:
        assert [(one["name"], one["kept"]) for one in server.ready["broken_limits"]] == [
            ("ttft_p99_s", False)
        ]
        server.end()
    assert says(server.said, "warning", "ttft_p99_s", "31.7 s")


def test_the_first_lines_round_what_a_search_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = orders.plan(tmp_path)
    chosen = plan.settings.model_copy(
        update={"parameters": plan.settings.parameters | {"min_interval_s": 4.779730550735673}}
    )
    plan = plan.model_copy(update={"settings": chosen})
    Announcement(Path("plan.json"), plan, ServerOptions(model="toy"), as_json=False)("http://h")
    assert " 4.78," in " ".join(capsys.readouterr().out.split())


def test_the_status_page_shows_broken_limits(tmp_path: Path) -> None:
    assert facts_of(broken_plan(orders.plan(tmp_path)), "toy")["predicted"]["ttft_p99_s"] == 31.7
    untuned = make_plan(samples.recipe(), samples.fit(), None, {})
    assert not any(facts_of(untuned, "toy")["predicted"].values())


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_the_report_shows_broken_limits_and_recommends_nothing() -> None:
    write_file(
        read_file(Tuning, "tuning.json").model_copy(update={"gain_percent": 53.1}), "tuning.json"
    )
    assert llmctl("render", *GIVEN, "--force") == 0
    page = report(gather("recipe.yaml"))
    assert "53.1" not in page
    assert "do not serve this" in page
    assert page.count("31.7 s") >= 2
    write_tuning(1.8, gain_percent=53.1)
    assert llmctl("render", *GIVEN) == 0
    assert "+53.1 % goodput" in report(gather("recipe.yaml"))


@pytest.mark.usefixtures("files")
def test_without_a_tuning_nothing_is_refused() -> None:
    assert llmctl("render", *GIVEN[:3]) == 0
    plan = read_file(Plan, "plan.json")
    assert plan.limits == recipe_limits(plan.recipe)
    assert {one.kept for one in plan.limits} == {None}
    assert plan.explained["limits"].value == "not predicted"
    assert plan.explained["limits"].source == UNTUNED


@pytest.mark.usefixtures("files")
def test_a_policy_of_the_user_has_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert llmctl("render", *GIVEN, "--policy", "sequence") == 2
    assert says(capsys.readouterr().err, "--tuning", "--policy")
    assert llmctl("render", *GIVEN[:3], "--policy", "sequence") == 0
    plan = read_file(Plan, "plan.json")
    assert (plan.outcome.metrics, {one.kept for one in plan.limits}) == ({}, {None})
    assert plan.explained["limits"].source == UNTUNED


def test_kept_defaults_are_what_is_judged(files: Path) -> None:
    write_tuning(31.7, keep_defaults=True)
    assert llmctl("render", *GIVEN) == 2
    write_tuning(1.8, keep_defaults=True)
    assert llmctl("render", *GIVEN) == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("drop", ["limits", "best", "best.outcome", "best.outcome.used"])
def test_a_tuning_that_does_not_say_whether_it_keeps_its_limits_is_made_again(
    drop: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(data: dict[str, Any]) -> None:
        *sections, key = drop.split(".")
        for name in sections:
            data = data[name]
        del data[key]

    edit("tuning.json", without)
    assert llmctl("render", *GIVEN) == 2
    error, *_, hint = capsys.readouterr().err.splitlines()
    assert says(error, "tuning.json", drop)
    assert says(hint, "llmctl tune RECIPE --fit FIT --trace TRACE")


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_a_plan_without_an_outcome_is_rendered_again(capsys: pytest.CaptureFixture[str]) -> None:
    write_tuning(1.8)
    assert llmctl("render", *GIVEN) == llmctl("render", *GIVEN, "--target", "local") == 0
    for file in ("plan.json", "local/plan.json"):
        edit(file, lambda data: data.pop("outcome"))
    capsys.readouterr()
    assert llmctl("serve", "plan.json") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert says(error, "plan.json", "outcome")
    assert says(hint, "llmctl render RECIPE --fit FIT --tuning TUNING")
    assert llmctl("render", *GIVEN, "--target", "local", "--force") == 0
    assert read_file(Plan, "local/plan.json").limits == read_file(Tuning, "tuning.json").limits


@pytest.mark.usefixtures("files")
def test_a_tuning_that_contradicts_itself_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    edit("tuning.json", lambda data: data["best"]["outcome"]["used"].update(ttft_p99_s=0.5))
    assert llmctl("render", *GIVEN) == 2
    assert says(capsys.readouterr().err, "tuning.json", "limits")


def edit(file: str, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(Path(file).read_text())
    change(data)
    Path(file).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (
            Limit(name="ttft_p99_s", bound="at most", limit=10, predicted=12.34, kept=False),
            "12.3 s (at most 10 s)",
        ),
        (
            Limit(name="ttft_p99_s", bound="at most", limit=10, predicted=10.004, kept=False),
            "10.004 s (at most 10 s)",
        ),
        (
            Limit(
                name="sla_attainment_lower_percent",
                bound="at least",
                limit=99,
                predicted=91.25,
                kept=False,
            ),
            "91.2 % (at least 99 %)",
        ),
    ],
)
def test_a_broken_limit_is_shown_with_its_unit_and_enough_digits(limit: Limit, told: str) -> None:
    assert breaks([limit]) == f"break 1 of 1 limit: {limit.name} is {told}"
