"""Where the numbers come from: the files with their digests, the machine, the versions."""

from __future__ import annotations

from toolkit.files.envelope import Envelope, Input
from toolkit.report.material import Material
from toolkit.report.parts import Cell, Section, Table
from toolkit.units import number

FACTS = ("Python", "system", "processor", "CPUs", "device", "packages")


def environment_section(found: Material) -> Section:
    """Files, targets, machines."""
    section = Section("origin", "Where this comes from", "Made from these files; another digest is another file.")
    rows: list[tuple[Cell, ...]] = [(one.role, one.name, one.sha256) for one in found.sources]
    section.tables.append(Table("Files", ["role", "name", "sha256"], rows))
    known = {one.sha256 for one in found.sources}
    behind = [(role, one.name, one.sha256) for role, one in _inputs(found).items() if one.sha256 not in known]
    if behind:
        section.tables.append(Table("What those were made from, and is not shown", ["role", "name", "sha256"], behind))
    targets = [(key, f"{number(limit)} s") for key, limit in found.recipe.sla.items()]
    section.tables.append(Table("Targets of the recipe", ["target", "limit"], targets))
    machines = _machines(found)
    if machines:
        section.tables.append(Table("Machines and versions", ["file", *FACTS], machines))
    return section


def _contents(found: Material) -> dict[str, Envelope]:
    roles = {"profile": found.profile, "fit": found.fit, "tuning": found.tuning, "plan": found.plan}
    return {role: one for role, one in (roles | {"validation": found.validation}).items() if one is not None}


def _inputs(found: Material) -> dict[str, Input]:
    return {role: one for content in _contents(found).values() for role, one in content.inputs.items()}


def _machines(found: Material) -> list[tuple[Cell, ...]]:
    """A row for each file; of the ones that were made alike, only the first."""
    rows: dict[tuple[Cell, ...], list[str]] = {}
    for role, content in _contents(found).items():
        made = content.environment
        packages = ", ".join(f"{name} {version}" for name, version in made.packages.items())
        key = (made.python, made.platform, made.processor, str(made.cpu_count), made.device, packages)
        rows.setdefault(key, []).append(role)
    return [(", ".join(roles), *key) for key, roles in rows.items()]
