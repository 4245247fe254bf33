"""The plan: every value that `serve` starts with, and where it comes from."""

from __future__ import annotations

from toolkit.report.material import Material
from toolkit.report.parts import Section, Table, missing

KEY, TITLE = "plan", "The plan"
PREDICTED = "predicted "


def plan_section(found: Material) -> Section:
    """What `plan.json` holds, as it explains itself."""
    plan = found.plan
    if plan is None:
        tuning = " --tuning tuning.json" if found.tuning else ""
        command = f"llmctl render {found.recipe.name} --fit fit.json{tuning}"
        return missing(KEY, TITLE, "There is no plan to serve yet.", command, found.why.get("plan", ""))
    told = plan.explained.items()
    decided = [(key, one.value, one.source) for key, one in told if not key.startswith(PREDICTED)]
    predicted = [(key.removeprefix(PREDICTED), one.value) for key, one in told if key.startswith(PREDICTED)]
    section = Section(KEY, TITLE, f"Policy '{plan.policy.name}' on {plan.workers} workers.")
    section.tables.append(Table("What is planned, and because of what", ["what", "planned", "because"], decided))
    if predicted:
        source = next(one.source for key, one in told if key.startswith(PREDICTED))
        section.tables.append(Table(f"What it should give: {source}", ["metric", "predicted"], predicted))
    return section
