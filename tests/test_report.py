"""`llmctl report`: one whole offline page, for any set of a recipe's files and any names."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from pathlib import Path

import pytest
import samples
import synthetic_profiles
from browser import CONTRAST, chromium, page_of
from commands import ran, refused
from orders import changed
from said import says
from test_cli_render import RECIPE, tuning

from toolkit.bench.client import Replay
from toolkit.bench.report import Prediction
from toolkit.bench.report import report as bench_report
from toolkit.deploy.plan import make_plan
from toolkit.endpoints.load import Sample
from toolkit.files.bench import BenchReport, ClientTimes
from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import RouterSpec
from toolkit.files.tuning import (
    ATTAINMENT,
    Outcome,
    PolicyResult,
    Settings,
    Tuning,
    judged_limits,
    recipe_limits,
)
from toolkit.report.material import EnvelopeT, Material, gather
from toolkit.report.page import report, summary_section
from toolkit.report.parts import ChartSeries, Judged, bars, chart
from toolkit.report.sections import bench_section, fit_section, tuning_section
from toolkit.sched.policies import KNOWN
from toolkit.sched.policies.parameters import defaults

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
SECTIONS = ("verdict", "bench", "tuning", "fit", "origin")


def of_files(content: EnvelopeT, **made_from: Path) -> EnvelopeT:
    """The content as it would be if it had been made from these files."""
    return content.model_copy(update={"inputs": head(made_from)["inputs"]})


@pytest.fixture
def folder(tmp_path) -> Path:
    """All the files of a recipe, each made from the ones before."""
    roles = ("recipe", "profile", "fit", "tuning", "plan")
    paths = {role: tmp_path / f"{role}.json" for role in roles}
    recipe = samples.recipe(description=EVIL)
    write_file(recipe, paths["recipe"])
    profile = synthetic_profiles.make_profile(noise=0.05)
    write_file(profile.model_copy(update={"recipe_name": recipe.name}), paths["profile"])
    fit = of_files(samples.fit(), recipe=paths["recipe"], profile=paths["profile"])
    write_file(fit, paths["fit"])
    made_from = {"recipe": paths["recipe"], "fit": paths["fit"]}
    tuned = tuning(made_from, sla=recipe.sla, trace_notes=[EVIL])
    write_file(tuned, paths["tuning"])
    plan = make_plan(recipe, fit, tuned, made_from | {"tuning": paths["tuning"]})
    write_file(plan, paths["plan"])
    return tmp_path


METRICS = {
    "goodput_rps": 3.2,
    "throughput_rps": 3.3,
    "ttft_p99_s": 1.5,
    "e2e_p95_s": 6.0,
    "oom_percent": 0.0,
}
KEPT = {"ttft_p99_s": 0.75, "e2e_p95_s": 0.8}  # used shares of the recipe's targets


def make_tuning(folder: Path, usage: dict[str, float] = KEPT, **changes: object) -> None:
    """Another tuning of the folder's fit, and the plan that comes of it."""
    paths = {role: folder / f"{role}.json" for role in ("recipe", "fit")}
    recipe = read_file(Plan, folder / "plan.json").recipe
    used = {one.name: usage.get(one.name, 0.0) for one in recipe_limits(recipe)}
    best = samples.evaluation("slice", defaults(KNOWN["slice"]), METRICS, used)
    limits = judged_limits(recipe, best.outcome)
    told = {"sla": recipe.sla, "best": best, "trials": [best], "limits": limits}
    trace = folder / "trace.jsonl"
    trace.write_text("{}\n")
    tuned = tuning(paths | {"trace": trace}, **(told | changes))
    write_file(tuned, folder / "tuning.json")
    write_plan(folder, tuned)


def write_plan(folder: Path, tuned: Tuning | None = None, policy: Settings | None = None) -> None:
    """Another plan of the folder's recipe and fit."""
    recipe = read_file(Plan, folder / "plan.json").recipe
    fit = read_file(Fit, folder / "fit.json")
    roles = ("recipe", "fit", "tuning") if tuned else ("recipe", "fit")
    made_from = {role: folder / f"{role}.json" for role in roles}
    write_file(make_plan(recipe, fit, tuned, made_from, policy), folder / "plan.json")


def make_bench(
    folder: Path, name: str, rate: float | None, plan: str = "plan.json", **measured: float
) -> None:
    """What `llmctl bench --plan PLAN --out NAME` writes."""
    recipe = read_file(Plan, folder / plan).recipe
    result = bench_report(
        Replay([Sample(0, 10, 5, 0, 1, 3, 0.5, 5, "")], False),
        head({"plan": folder / plan}),
        model="tiny",
        lengths="hidden",
        trace_notes=[],
        sla=recipe.sla,
        predicted=Prediction(Outcome(metrics={"throughput_rps": 0.5}, used={})),
        policy="slice",
        request_rate_rps=rate,
    )
    seen = {"measured": Outcome(metrics=result.measured.metrics | measured, used={})}
    write_file(result.model_copy(update=seen), folder / name)


def verdict_of(folder: Path) -> str:
    """The verdict's HTML, without what comes after it."""
    page = page_of_plan(folder)
    return page[page.index('<section id="verdict"') : page.index('<section id="bench"')]


def material(folder: Path) -> Material:
    """The files about the folder's plan."""
    return gather(str(folder / "plan.json"))


def page_of_plan(folder: Path) -> str:
    return report(material(folder))


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def test_the_page_starts_with_the_verdict_in_words(folder):
    make_tuning(folder)
    html = verdict_of(folder)
    text = text_of(html)
    assert '<p class="badge kept"><b>✓</b>' in html
    assert f"llmctl serve {folder / 'plan.json'}" in text
    assert says(text, "slice")
    assert says(text, "trace.jsonl", "3", "requests/s")
    for values in ("2 s 1.5 s ✓", "8 s 6.4 s ✓", "3.2 requests/s"):
        assert values in text  # as the tuning judged them: all requests together
    assert (
        html.index("badge")
        < html.index("llmctl serve")
        < html.index("<table")
        < html.index("<figure")
    )
    assert "<details" not in html


def test_a_broken_target_is_shown_in_words_with_its_used_share(folder):
    make_tuning(folder, {"ttft_p99_s": 10.08, "e2e_p95_s": 1.1})
    html = verdict_of(folder)
    text = text_of(html)
    assert says(text, "✗", "20.2 s", "at most 2 s", "8.8 s", "at most 8 s")
    assert "2 s 20.2 s ✗" in text
    assert says(text, "1,008 %", "110 %")


@pytest.mark.parametrize(("surely", "kept"), [(99.4, True), (98.1, False)])
def test_the_attainment_is_a_limit_where_the_recipe_has_one(folder, surely, kept):
    """It is judged by its confidence bound, not by the share itself."""
    found = material(folder)
    metrics = {"sla_attainment_percent": 99.2, ATTAINMENT: surely}
    used = {one.name: 0.0 for one in found.plan.limits}
    used["sla_attainment_percent"] = 100.0 - surely
    outcome = Outcome(metrics=metrics, used=used)
    plan = changed(found.plan, recipe__tune__min_attainment_percent=99.0, outcome=outcome)
    section = summary_section(replace(found, plan=plan))
    assert section.badge.state == ("kept" if kept else "broken")
    assert ("98.1 %" in section.badge.text) is not kept
    rows = {row[0]: row[1:3] for row in section.tables[0].rows}
    judged = ["at least 99 %", Judged(f"{surely} %", kept)]
    assert rows["requests within every target, at least"] == judged


@pytest.mark.slow
def test_measured_values_are_shown_and_judged(folder):
    make_tuning(folder)
    make_bench(folder, "bench.json", 3.01, ttft_p99_s=1.6, e2e_p95_s=7.0, goodput_rps=2.9)
    text = text_of(verdict_of(folder))
    assert says(text, "kept", "bench.json")
    assert re.search(r"2 s 1\.5 s ✓ \w+ 1\.6 s ✓", text)
    assert "3.2 requests/s 2.9 requests/s" in text
    assert says(text, "bench.json")
    make_bench(folder, "bench.json", 3.0, ttft_p99_s=2.6, e2e_p95_s=7.0)
    text = text_of(verdict_of(folder))
    assert says(text, "✗", "p99", "bench.json")
    assert says(text, "130 %")


def test_a_bench_at_another_rate_does_not_judge_the_targets(folder):
    make_tuning(folder)
    make_bench(folder, "overload.json", 9.0, ttft_p99_s=50.0)
    assert summary_section(material(folder)).badge.state == "kept"


def test_benches_of_the_plan_are_found_and_those_at_its_rate_come_first(folder):
    make_tuning(folder)
    shutil.copy(folder / "plan.json", folder / "other-plan.json")
    with (folder / "other-plan.json").open("a") as file:
        file.write(" ")  # other bytes: another plan
    make_bench(folder, "a.json", 3.0, "other-plan.json")
    make_bench(folder, "b.json", 9.0)
    make_bench(folder, "c.json", 3.0)
    (folder / "package.json").write_text('{"name": "no bench"}')
    (folder / "bench-torn.json").write_text(
        '{"measured": {}, "compared": [], "answered": 1, "inputs": {}}'
    )
    found = material(folder)
    assert [one.name for one in found.benches] == ["c.json", "b.json"]
    assert found.why.keys() == {"a.json", "bench-torn.json"}
    assert says(found.why["a.json"], "other-plan.json")
    text = text_of(report(found))
    assert says(text, "c.json", "plan.json", "'slice'", "3", "requests/s")
    assert says(text, "bench-torn.json")


LATE = ClientTimes(
    beats=500,
    beat_late_p99_s=0.4,
    beat_late_max_s=0.9,
    send_late_p99_s=0.4,
    connect_p99_s=0.4,
    connect_late_p99_s=0.4,
    limit_s=0.1,
    late=True,
)


def test_the_page_begins_with_its_date_and_its_machine(folder):
    day = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
    for path in folder.iterdir():
        os.utime(path, (day, day))
    found = material(folder)
    header = text_of(report(found).partition("<nav")[0])
    assert "2026-11-28" in header
    assert found.plan.environment.processor in header
    assert {one.date for one in found.sources} == {"2026-11-28"}


def test_a_large_error_is_red_and_says_so(folder):
    drawn = {size: bars({"throughput": size}, 15.0, "large") for size in (14.0, -43.0)}
    assert not drawn[14.0][0].large
    assert drawn[-43.0][0].large
    assert "large" in drawn[-43.0][0].text
    make_bench(folder, "mine.json", 3.0)
    [figure] = bench_section(material(folder)).figures
    assert any(bar.large for bar in figure.drawing)


def test_a_bench_of_another_fit_of_none_or_by_a_late_client_is_named_and_left_out(folder):
    make_bench(folder, "mine.json", 3.0)
    mine = read_file(BenchReport, folder / "mine.json")
    write_file(mine.model_copy(update={"client": LATE}), folder / "late.json")
    content = json.loads((folder / "mine.json").read_text())
    content["inputs"]["plan"]["sha256"] = "0" * 64
    (folder / "other.json").write_text(json.dumps(content))
    content["inputs"] = {}
    (folder / "none.json").write_text(json.dumps(content))
    found = material(folder)
    assert [one.name for one in found.benches] == ["mine.json"]
    assert found.why.keys() == {"late.json", "other.json", "none.json"}
    assert says(found.why["other.json"], "other.json", "plan.json")
    assert "without --plan" in found.why["none.json"]


def test_untuned_settings_have_an_open_verdict(folder):
    write_plan(folder)
    (folder / "tuning.json").unlink()
    assert "not tuned" in text_of(verdict_of(folder))


def test_changes_to_the_trace_are_on_the_page(folder):
    make_tuning(folder, trace_notes=["prompts divided by 11.91"])
    assert says(text_of(page_of_plan(folder)), "11.91")


def test_routers_are_told_apart_by_their_names(folder):
    found = material(folder)
    results = []
    for name in ("by-law", "round-robin"):
        router = RouterSpec(name=name)
        best = samples.evaluation("vllm", {}, METRICS, router=router)
        results.append(PolicyResult(best=best, trials=1, judged_requests=9, refusal=None))
    changes = {"best": results[0].best, "policies": results}
    tuned = found.tuning.model_copy(update=changes)
    table = tuning_section(replace(found, tuning=tuned)).tables[0]
    assert table.columns[0] == "router"
    assert [row[0] for row in table.rows] == ["by-law", "round-robin"]


def test_the_page_shows_all_files(folder):
    make_bench(folder, "overload.json", 9.0)
    found = material(folder)
    assert found.why == {}
    assert [one.role for one in found.sources] == ["plan", "tuning", "bench"]
    page = report(found)
    assert re.findall(r'<section id="(\w+)"', page) == list(SECTIONS)
    assert "This makes it" not in page
    assert page.count("<figure") >= 2
    assert all(one.sha256 in page for one in found.sources)
    assert page == page_of_plan(folder)
    assert len(page.encode()) < 2 << 20


def test_names_are_escaped(folder):
    page = page_of_plan(folder)
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 2
    assert "<script" not in chart(
        EVIL, EVIL, [ChartSeries(EVIL, [(1, 2, EVIL)]), ChartSeries("b", [(1, 2, "")])]
    )


def test_a_missing_file_names_the_command_that_makes_it(folder, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert says(report(gather("tiny-llama-cpu")), "llmctl tune tiny-llama-cpu")
    Path("mine.yaml").write_text(RECIPE)
    page = report(gather("mine.yaml"))
    assert says(page, "llmctl profile mine.yaml", "llmctl fit profile.json")
    (folder / "plan.json").rename("plan.json")
    page = report(gather("plan.json"))
    assert says(page, "llmctl tune recipe.json")
    assert says(page, "llmctl bench --plan plan.json")


def test_a_file_about_another_fit_is_not_shown(folder, capsys):
    other = samples.fit(capacity_tokens=4096)
    write_file(other, folder / "fit.json")
    tuned = tuning({"recipe": folder / "recipe.json", "fit": folder / "fit.json"})
    write_file(tuned, folder / "tuning.json")
    err = ran(capsys, "report", folder / "plan.json", "--out", folder / "report.html").err
    assert says(err, "tuning.json")
    assert "not the one" in (folder / "report.html").read_text()


def test_an_unreadable_source_is_one_line(tmp_path, capsys):
    assert refused(capsys, "report", tmp_path / "plan.json", "--out", tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [-1.0, 0.0, 3.0], [1e-9, 1e9], [5.0, 5.0]])
def test_charts_of_all_numbers_can_be_drawn(values):
    for kind in ("points", "line", "marks"):
        series = ChartSeries("a", [(value, value, "") for value in values], kind)
        text = chart("x", "y", [series], level=0.0)
        assert "nan" not in text
        assert text == "" or text.startswith("<svg ")


@pytest.mark.slow
def test_a_browser_shows_it_without_errors_or_requests(folder):
    (folder / "report.html").write_text(page_of_plan(folder), encoding="utf-8")
    url = (folder / "report.html").as_uri()
    with chromium() as browser, page_of(browser, url) as (page, seen):
        assert page.locator("main > section").count() == len(SECTIONS)
        first = page.locator("details").first
        assert not first.locator("table").is_visible()
        first.locator("summary").focus()
        page.keyboard.press("Enter")
        assert first.locator("table").is_visible()
        for width, scheme in ((360, "dark"), (1200, "light")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            assert page.evaluate(CONTRAST) == []
        page.emulate_media(media="print")
        assert not page.locator("nav").is_visible()
        page.set_viewport_size({"width": 720, "height": 1000})  # an A4 page is that wide
        assert page.evaluate("document.documentElement.scrollWidth") == 720
        heights = [one.bounding_box()["height"] for one in page.locator("details table").all()]
        assert min(heights) > 20, "printed whole"
        assert seen.complaints == []
        assert seen.hosts == {"file"}


def test_passes_of_a_paged_engine_have_their_error_shown(folder):
    found = material(folder)
    paged = fit_section(replace(found, fit=samples.paged_fit()))
    assert "pass" in [row[0] for row in paged.tables[0].rows]
    assert "pass" not in [row[0] for row in fit_section(found).tables[0].rows]


def test_a_bar_shows_its_share_of_the_limit():
    def lengths(values: dict[str, float], most: float) -> list[float]:
        return [bar.width for bar in bars(values, most, "broken")]

    assert lengths({"a": 25.0, "b": -50.0}, 100.0) == [25.0, 50.0]
    assert lengths({"a": 50.0, "b": 200.0}, 100.0) == [25.0, 100.0]
    assert lengths({"a": 1.0, "b": 2.0}, math.inf) == [50.0, 100.0]
    assert lengths({"a": 0.0}, math.inf) == [0.0]
