"""`llmctl report`: one page, whole and offline, whatever there is of a recipe's files, and whatever it is called."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import samples
import synthetic_profiles
from browser import chromium, page_of
from commands import llmctl
from test_cli_render import tuning

from toolkit.deploy.plan import make_plan
from toolkit.files.io import head, write_file
from toolkit.files.validation import MetricError, RequestError, Validation, WindowResult
from toolkit.report.fits import fit_section
from toolkit.report.material import gather
from toolkit.report.page import report
from toolkit.report.svg import Axes, Series, bars, chart

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
SECTIONS = ("fit", "tuning", "validation", "plan", "origin")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All the files of a recipe, each made from the ones before."""
    paths = {role: tmp_path / f"{role}.json" for role in ("recipe", "profile", "fit", "tuning", "plan", "validation")}
    recipe = samples.recipe(description=EVIL)
    write_file(recipe, paths["recipe"])
    profile = synthetic_profiles.make_profile(noise=0.05).model_copy(update={"recipe_name": recipe.name})
    write_file(profile, paths["profile"])
    fit = samples.fit().model_copy(
        update={"inputs": head({"recipe": paths["recipe"], "profile": paths["profile"]})["inputs"]}
    )
    write_file(fit, paths["fit"])
    made_from = {"recipe": paths["recipe"], "fit": paths["fit"]}
    tuned = tuning(made_from)
    write_file(tuned, paths["tuning"])
    write_file(make_plan(recipe, fit, tuned, made_from | {"tuning": paths["tuning"]}), paths["plan"])
    window = WindowResult(
        start_s=0,
        end_s=9,
        requests=7,
        failed=1,
        slowdown=1,
        measured={"throughput_rps": 2},
        predicted={"throughput_rps": 3},
    )
    validation = Validation(
        **head({"plan": paths["plan"], "fit": paths["fit"]}),
        model=EVIL,
        policy="slice",
        notes=[EVIL],
        windows=[window],
        metrics=[MetricError(metric="throughput_rps", measured=2, predicted=3, error_percent=50, worst_percent=50)],
        requests=[
            RequestError(latency=EVIL, median_percent=1, median_absolute_percent=2, p90_absolute_percent=3, requests=7)
        ],
    )
    write_file(validation, paths["validation"])
    return tmp_path


def test_everything_there_is_is_on_the_page(folder: Path):
    found = gather(str(folder / "plan.json"))
    assert found.why == {}
    assert [one.role for one in found.sources] == ["plan", "profile", "tuning", "validation"]
    page = report(found)
    assert re.findall(r'<section id="(\w+)"', page) == list(SECTIONS)
    assert "This makes it" not in page
    assert page.count("<svg") >= 7
    assert all(one.sha256 in page for one in found.sources)
    assert page == report(gather(str(folder / "plan.json")))
    assert len(page.encode()) < 2 << 20


def test_no_name_becomes_markup(folder: Path):
    page = report(gather(str(folder / "plan.json")))
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;") >= 3
    assert "<script" not in bars({EVIL: 1.0}) + chart(Axes(EVIL, EVIL, [Series(EVIL, [1], [2]), Series("b", [1], [2])]))


def test_what_is_not_there_names_the_command_that_makes_it(folder: Path, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    page = report(gather(str(folder / "plan.json"), empty))
    assert "llmctl tune test --fit fit.json --trace TRACE" in page
    assert "llmctl validate plan.json --url URL" in page
    page = report(gather("tiny-llama-cpu", empty))
    assert "llmctl profile tiny-llama-cpu; llmctl fit profile.json" in page
    assert "llmctl render tiny-llama-cpu --fit fit.json" in page


def test_a_file_about_another_fit_is_not_shown(folder: Path, capsys):
    other = samples.fit(capacity_tokens=4096)
    write_file(other, folder / "fit.json")
    tuned = tuning({"recipe": folder / "recipe.json", "fit": folder / "fit.json"})
    write_file(tuned, folder / "tuning.json")
    assert llmctl("report", folder / "plan.json", "--out", folder / "report.html") == 0
    assert "tuning.json is about another fit, not the one that is shown here" in capsys.readouterr().err
    assert "not the one that is shown here" in (folder / "report.html").read_text()


def test_a_source_that_cannot_be_read_is_one_line(tmp_path: Path, capsys):
    assert llmctl("report", tmp_path / "plan.json", "--out", tmp_path / "report.html") == 2
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", [[], [0.0], [1.0], [-1.0, 0.0, 3.0], [1e-9, 1e9], [5.0, 5.0]])
def test_charts_of_any_numbers_can_be_drawn(values, log):
    for kind in ("points", "line", "marks"):
        text = chart(Axes("x", "y", [Series("a", values, values, kind)], log=log, level=None if log else 0.0))
        assert "nan" not in text
        assert text == "" or text.startswith("<svg ")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light")])
def test_a_browser_shows_it_without_a_complaint_or_a_request(folder: Path, width, scheme):
    (folder / "report.html").write_text(report(gather(str(folder / "plan.json"))), encoding="utf-8")
    options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    with (
        chromium() as browser,
        page_of(browser, (folder / "report.html").as_uri(), **options) as (page, seen),
    ):
        assert page.locator("main > section").count() == len(SECTIONS)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.emulate_media(media="print")
        assert not page.locator("nav").is_visible()
        assert seen.complaints == []
        assert seen.hosts == {"file"}


def test_the_memory_edge_is_that_of_one_number_of_steps(folder: Path):
    found, few = gather(str(folder / "plan.json")), synthetic_profiles.probe_all(1.0, steps=16)
    edges = [
        fit_section(replace(found, profile=synthetic_profiles.make_profile(noise=0.05, memory=probes))).figures[-1]
        for probes in (few, [*few, *synthetic_profiles.probe_all(1.0, steps=128)])
    ]
    assert edges[0] == edges[1]


def test_passes_of_a_paged_engine_have_their_error_shown(folder: Path):
    found = gather(str(folder / "plan.json"))
    paged = fit_section(replace(found, fit=samples.paged_fit(), profile=None))
    assert "passes" in str(paged.tables[0].rows)
    assert "passes" not in str(fit_section(found).tables[0].rows)
