"""`llmctl policies`: the policies, a line each."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import aligned, emit

SIMULATED = "in simulations only: they need the future"


@dataclass(frozen=True, slots=True)
class PolicyLine:
    """A policy. `engines` are those that can serve with it; none: it runs in simulations only."""

    name: str
    does: str
    source: str
    engines: list[str]

    @property
    def live(self) -> bool:
        """Whether a server can run it."""
        return bool(self.engines)


def command(as_json: JsonOption = False) -> None:
    """List the policies: what each does, which paper or system describes it, and which engines run
    it.

    A policy that needs the future runs in simulations only. docs/explanation/policies.md has the
    details and the parameters.
    """
    from toolkit.sched.catalogue import ABOUT
    from toolkit.sched.policies import KNOWN, engines_for

    lines = [
        PolicyLine(name, ABOUT[name].does, ABOUT[name].source, engines_for(name)) for name in KNOWN
    ]
    found = [
        {
            "name": one.name,
            "does": one.does,
            "source": one.source,
            "engines": one.engines,
            "live": one.live,
        }
        for one in lines
    ]
    emit(as_json, {"policies": found}, lambda: _show(lines))


def _show(lines: list[PolicyLine]) -> None:
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for one in sorted(lines, key=lambda line: not line.live):
        groups.setdefault(tuple(one.engines), []).append((f"  {one.name}", one.does, one.source))
    heads = ("policy", "what it does", "described by")
    show = aligned([heads, *(row for rows in groups.values() for row in rows)])
    show(heads)
    for engines, rows in groups.items():
        where = f"live on {', '.join(engines)}" if engines else SIMULATED
        print(f"\n{where}")
        for row in rows:
            show(row)
