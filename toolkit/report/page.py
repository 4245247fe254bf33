"""How the page is put together and written: sections of words, tables and charts, one file, no
scripts.

The verdict comes first. Each section has its pictures before its tables, which are folded but for
the verdict's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2

import toolkit
from toolkit.files.shipped import shipped_templates
from toolkit.report.material import Material, environment_section
from toolkit.report.parts import Section
from toolkit.report.sections import (
    bench_section,
    fit_section,
    plan_section,
    tuning_section,
    validation_section,
)
from toolkit.report.summary import summary_section


@dataclass(frozen=True, slots=True)
class Report:
    """The page, for its template."""

    title: str
    description: str
    version: str
    sections: Sequence[Section] = field(default_factory=tuple)


def report(found: Material) -> str:
    """The page as HTML. The same files give the same text."""
    sections = [
        summary_section(found),
        bench_section(found),
        validation_section(found),
        tuning_section(found),
        fit_section(found),
        plan_section(found),
        environment_section(found),
    ]
    page = Report(found.recipe.name, found.recipe.description, toolkit.__version__, sections)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html.j2").render(page=page)
