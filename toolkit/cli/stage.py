"""What `simulate` and `compare` set up alike: a trace, laws or the token-step world, and what to say about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Kind
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.types import Refusal
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace

TraceOption = Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")]
FitOption = Annotated[
    str, typer.Option(help="fit.json, the name of a recipe whose fit ships, or 'unit-step': a clock that counts steps.")
]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Workers; default: as profiled, or 1.")]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(min=1, help="Limit of requests whose trace names none; default: 256, or 4096 in unit-step."),
]
FitLengthsOption = Annotated[bool, typer.Option(help="Scale lengths into the model's context first.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the memory edge's and the policies' draws.")]


@dataclass(frozen=True, slots=True)
class Stage:
    """A trace as asked for, and the fit to run it on; None: the token-step world."""

    trace: Trace
    fit: Fit | None
    kinds: Sequence[Kind] = ()  # of a fleet, whose first kind has the fit

    @property
    def engines(self) -> list[str]:
        """The engines whose laws these are; none in the token-step world."""
        if self.kinds:
            return [kind.fit.engine.engine for kind in self.kinds]
        return [self.fit.engine.engine] if self.fit else []

    def world(self, given: Mapping[str, Value], workers: int | None, max_new_tokens: int | None, seed: int) -> World:
        """What is simulated, with the settings that were given. `InputError` for one that cannot be."""
        from toolkit.cli.fleet import refuse_workers
        from toolkit.sim.settings import make_world

        if self.kinds:
            refuse_workers(workers)
        count = self.kinds[0].workers if self.kinds else workers or 0
        limit = max_new_tokens or 0
        return make_world(self.fit, given, workers=count, max_new_tokens=limit, seed=seed, others=self.kinds[1:])


def open_stage(trace: str, fit: str, max_new_tokens: int | None, fit_lengths: bool, fleet: Path | None = None) -> Stage:
    """Read both, or instead of the fit a fleet; lengths are scaled into the model's context where asked for."""
    from toolkit.cli.basis import note_basis
    from toolkit.files.fit import Fit
    from toolkit.files.fits import fit_path
    from toolkit.files.io import read_file
    from toolkit.sim.settings import UNIT_STEP, USUAL_LIMIT
    from toolkit.traces.read import read_trace
    from toolkit.traces.scale import scale_lengths
    from toolkit.traces.shipped import trace_path

    kinds: Sequence[Kind] = ()
    fitted: Fit | None
    if fleet is not None:
        from toolkit.cli.fleet import open_fleet

        opened = open_fleet(fleet)
        opened.note_bases()
        kinds, fitted = opened.kinds, opened.kinds[0].fit
    else:
        path = None if fit == UNIT_STEP and not Path(fit).exists() else fit_path(fit)
        fitted = read_file(Fit, path) if path else None
        if path and fitted:
            note_basis(fitted, path)
    requests, _ = read_trace(trace_path(trace))
    if fitted and fit_lengths:
        requests = scale_lengths(requests, fitted.engine.max_model_len, max_new_tokens or USUAL_LIMIT)
    return Stage(requests, fitted, kinds)


def refusal_notes(refusals: Sequence[Refusal]) -> list[str]:
    """A line that counts who can never be served, with an example; none where all can be."""
    if not refusals:
        return []
    first, count = refusals[0], len(refusals)
    who = "1 request" if count == 1 else f"{count:,} requests"
    return [f"{who} rejected; for example number {int(first.request_id) + 1}: {first.reason}"]


def world_notes(world: World, policy: str, metrics: Mapping[str, float]) -> list[str]:
    """What a reader must know before believing the figures of one simulation, of the policy of this name."""
    from toolkit.sim.validity import extrapolation_warning

    lines, valid = [], world.range_of(policy)
    if valid is not None:
        warning = extrapolation_warning(metrics["extrapolated_batches_percent"], valid)
        lines += [f"warning: {warning}"] if warning else []
    return [*lines, *unfinished_notes(metrics)]


def unfinished_notes(metrics: Mapping[str, float]) -> list[str]:
    """A line that counts those whom a simulation without `drain` left; none where there are none."""
    if not metrics["unfinished"]:
        return []
    return [f"stopped when the last request was admitted: {metrics['unfinished']:,.0f} had not ended"]
