"""The files that a report shows: the files of one recipe in one folder that belong together.

A file that is about another fit, or cannot be read, is left out; the page says why, and which
command makes it again. `llmctl bench --out` takes any name, so benches, any number of them, are
found by their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from toolkit.errors import InputError
from toolkit.files.bench import NOT_SERVERS, SAME_RATE, BenchReport
from toolkit.files.fit import Fit
from toolkit.files.io import FIT, digest, read_file, shipped_fit
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import is_recipe, load_recipe, recipe_path
from toolkit.files.strict import Envelope
from toolkit.files.tuning import Tuning
from toolkit.report.steps import recipe_of, typed
from toolkit.units import counted

EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)

Basis = tuple[str, str]  # what laws come from: the role of a file and its digest
ROLES = ("recipe", "profile", "fit", "tuning", "plan")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that the page shows; `date` is the day (UTC) when it was written."""

    role: str
    name: str
    sha256: str
    date: str


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A replay against a server that ran the shown plan."""

    name: str
    content: BenchReport

    @property
    def values(self) -> dict[str, float]:
        """Every measured metric and target; not every target is a metric of a bench."""
        sla = self.content.sla
        measured = self.content.measured
        return measured.metrics | {name: share * sla[name] for name, share in measured.used.items()}

    def at_rate(self, rate_rps: float | None) -> bool:
        """Whether it replayed the trace at this mean rate; False where a rate is not known."""
        rate = self.content.request_rate_rps
        if rate is None or rate_rps is None:
            return False
        return abs(rate - rate_rps) <= SAME_RATE * rate_rps


@dataclass(slots=True)
class Material:
    """All files of a report, in `folder`. `why` has, for each left-out role or file, the reason.

    `benches` are of the shown plan: first those at the rate that it was tuned for, and among equals
    the newest.
    """

    recipe: Recipe
    recipe_file: Path
    folder: Path = Path()
    profile: Profile | None = None
    fit: Fit | None = None
    tuning: Tuning | None = None
    plan: Plan | None = None
    benches: list[BenchResult] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)

    @property
    def rate_rps(self) -> float | None:
        """The mean rate that the settings were tuned for; None without a tuning."""
        if self.plan is not None:
            return self.plan.workload.request_rate_rps if self.plan.workload else None
        return self.tuning.request_rate_rps if self.tuning else None

    @property
    def made(self) -> str:
        """When the newest file was written, and the machines of the benches, the plan, the tuning
        and the fit. '' where there is none of these.
        """
        files = [*(bench.content for bench in self.benches), self.plan, self.tuning, self.fit]
        machines = {
            f"{one.processor}, {counted(one.cpu_count, 'processor')}"
            + (f", device {one.device}" if one.device != "cpu" else "")
            for one in (file.environment for file in files if file)
        }
        if not machines:
            return ""
        newest = max(source.date for source in self.sources)
        return f"Files of {newest}, made on {'; '.join(sorted(machines))}."

    @property
    def next_step(self) -> tuple[str, str]:
        """What to do next, and the command that does it."""
        from toolkit.profiling.analytic import by_operators  # it loads scipy

        recipe = self.recipe_file
        if self.plan is not None:
            return "Start it", typed("serve", self.file_name("plan"))
        if self.tuning is not None:
            return "Plan it", typed("render", recipe, "--tuning", self.file_name("tuning"))
        if self.fit is None and self.profile is not None:
            return "Fit it", typed("fit", self.file_name("profile"))
        if self.fit is not None or by_operators(self.recipe):
            return "Tune it", typed("tune", recipe)
        return "Measure it", typed("profile", recipe)

    def file_name(self, role: str) -> str:
        """Return the path of the shown file of a role; without one, the commands' default name."""
        names = [source.name for source in self.sources if source.role == role]
        return str(self.folder / (names[0] if names else f"{role}.json"))


def gather(source: str) -> Material:
    """The files about `source`: a plan.json, with those beside it, or a recipe, with those in the
    working folder.

    Raises `InputError` where `source` itself cannot be read.
    """
    if not is_recipe(source):
        path = Path(source)
        plan = read_file(Plan, path)
        folder = path.parent
        files = Material(plan.recipe, recipe_of(plan, folder), folder, fit=plan.fit, plan=plan)
        files.sources.append(_source("plan", path))
        basis = _basis_of(plan)
    else:
        recipe = recipe_path(source)
        files = Material(load_recipe(recipe), recipe, sources=[_source("recipe", recipe)])
        folder = Path()
        files.fit = _take(files, Fit, folder / FIT, inputs={"recipe": recipe})
        ships = shipped_fit(recipe.stem)
        if files.fit is None and ships and "fit" not in files.why:
            files.fit = _take(files, Fit, ships, inputs={"recipe": recipe})
        if files.fit is None:
            profile = folder / "profile.json"
            files.profile = _take(files, Profile, profile, inputs={"recipe": recipe})
        if "fit" in files.why:
            return files
        role = "fit" if files.fit else "recipe"
        basis = role, next(one.sha256 for one in files.sources if one.role == role)
        files.plan = _take(files, Plan, folder / "plan.json", basis)
        if files.fit is None and files.plan:
            files.fit = files.plan.fit  # computed: no file has it
    files.tuning = _take(files, Tuning, folder / "tuning.json", basis)
    _take_benches(files, folder)
    return files


def _take_benches(files: Material, folder: Path) -> None:
    """Take every bench of the shown plan in the folder; see `Material.benches`."""
    shown = {source.sha256 for source in files.sources if source.role == "plan"}
    taken: list[tuple[BenchResult, SourceFile]] = []
    paths = [path for path in folder.glob("*.json") if path.stem not in ROLES and path.is_file()]
    for path in sorted(paths, key=lambda path: (-path.stat().st_mtime, path)):
        try:
            content = read_file(BenchReport, path)
        except InputError as error:
            if path.name.startswith("bench"):  # others may be no files of llmctl
                files.why[path.name] = error.whole
            continue
        if "plan" not in content.inputs:
            files.why[path.name] = f"{path.name} was made without --plan, so its plan is not known"
        elif _sha256_of(content, "plan") not in shown:
            plan = content.inputs["plan"].name
            files.why[path.name] = f"{path.name} is about another plan ({plan})"
        elif content.late:
            files.why[path.name] = f"{path.name} is {NOT_SERVERS}: {content.late}"
        else:
            taken.append((BenchResult(path.name, content), _source("bench", path)))
    taken.sort(key=lambda pair: not pair[0].at_rate(files.rate_rps))
    files.benches = [bench for bench, _ in taken]
    files.sources += [source for _, source in taken]


def _take(
    files: Material,
    kind: type[EnvelopeT],
    path: Path,
    basis: Basis | None = None,
    *,
    inputs: Mapping[str, Path] | None = None,
) -> EnvelopeT | None:
    """The file, or None where it does not exist or does not belong to the others.

    It must be made from `inputs` and rest on `basis`.
    """
    if not path.is_file():
        return None
    role = path.stem
    source = _source(role, path)
    try:
        content = read_file(kind, path, inputs=inputs)
    except InputError as error:
        files.why[role] = error.whole
        return None
    if basis is not None and basis != _basis_of(content):
        other = f"another {basis[0]}, not the one that is shown here"
        files.why[role] = f"{path.name} is about {other}"
        return None
    files.sources.append(source)
    return content


def _basis_of(content: Envelope) -> Basis:
    """What the laws behind `content` come from: its fit, or the recipe where they were computed."""
    role = "fit" if "fit" in content.inputs else "recipe"
    return role, _sha256_of(content, role)


def _sha256_of(content: Envelope, role: str) -> str:
    """The digest of the input that `content` was made from; '' where it is not recorded."""
    return content.inputs[role].sha256 if role in content.inputs else ""


def _source(role: str, path: Path) -> SourceFile:
    source = digest(path)
    day = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    return SourceFile(role, source.name, source.sha256, day.isoformat())
