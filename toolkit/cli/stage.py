"""What `simulate` and `compare` set up alike: a trace, laws or the token-step world, and what to
say about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import limit_workers, resolve_recipe

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Kind
    from toolkit.files.recipe import Recipe
    from toolkit.sched.policies.parameters import Value
    from toolkit.sched.types import Refusal
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace

TraceOption = Annotated[
    str,
    typer.Option(
        autocompletion=completion.traces, help="A trace file, or the name of a shipped trace."
    ),
]
FitOption = Annotated[
    str,
    typer.Option(
        autocompletion=completion.fits_and_clock,
        help="fit.json, the name of a recipe whose fit ships, or 'unit-step': a clock that counts steps.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, callback=limit_workers, help="Workers; default: as profiled, or 1."),
]
MaxNewTokensOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Limit of requests whose trace names none; default: the recipe's, or 4096 in unit-step.",
    ),
]
RecipeOption = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        callback=resolve_recipe,
        help="The fit's recipe, which limits lengths; default: beside the fit, here, or shipped.",
    ),
]
FitLengthsOption = Annotated[
    bool, typer.Option(help="Scale lengths into the model's context first.")
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="Seed of the memory edge's and the policies' draws.")
]


@dataclass(frozen=True, slots=True)
class Stage:
    """A trace as it will be simulated, and the fit to run it on; None: the token-step world."""

    trace: Trace
    fit: Fit | None
    max_new_tokens: int  # of requests whose trace names no limit; 0: the token-step world's own
    kinds: Sequence[Kind] = ()  # of a fleet, whose first kind has the fit

    @property
    def engines(self) -> list[str]:
        """The engines whose laws these are; none in the token-step world."""
        if self.kinds:
            return [kind.fit.engine.engine for kind in self.kinds]
        return [self.fit.engine.engine] if self.fit else []

    def world(self, given: Mapping[str, Value], workers: int | None, seed: int) -> World:
        """What is simulated, with the settings that were given. `InputError` for one that cannot
        be.
        """
        from toolkit.cli.basis import refuse_workers
        from toolkit.sim.world import make_world

        if self.kinds:
            refuse_workers(workers)
        count = self.kinds[0].workers if self.kinds else workers or 0
        others, limit = self.kinds[1:], self.max_new_tokens
        return make_world(
            self.fit, given, workers=count, max_new_tokens=limit, seed=seed, others=others
        )


def open_stage(
    trace: str,
    fit: str,
    max_new_tokens: int | None,
    fit_lengths: bool,
    fleet: Path | None = None,
    recipe: Path | None = None,
) -> Stage:
    """Read the trace, and the fit or the fleet; say what was done to the lengths, and what the fit
    rests on.

    Lengths are scaled as `tune` does it, by the limits of the recipe that the fit was made from;
    `max_new_tokens` takes the place of the recipe's. `InputError` for files that are not there or
    not of their kind, and where that recipe is not found; without a fit it names those that ship.
    """
    from toolkit.cli.basis import note_basis, note_scaling
    from toolkit.errors import InputError
    from toolkit.files.fit import Fit
    from toolkit.files.io import fit_path, read_file, shipped_fits
    from toolkit.sim.world import UNIT_STEP
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import prepare, scale_lengths

    kinds: Sequence[Kind] = ()
    spec: Recipe | None = None
    fitted: Fit | None = None
    note_bases: Callable[[], None] | None = None
    if fleet is not None:
        from toolkit.cli.basis import open_fleet

        _refuse_recipe(recipe, "a fleet names its recipes")
        opened = open_fleet(fleet)
        kinds, note_bases = opened.kinds, opened.note_bases
        spec, fitted = kinds[0].recipe, kinds[0].fit
    elif fit == UNIT_STEP and not Path(fit).exists():
        _refuse_recipe(recipe, f"--fit {UNIT_STEP} has none")
    else:
        path = fit_path(fit)
        if not path.exists():
            made = "make it with: llmctl fit PROFILE; or name one that ships with --fit"
            raise InputError(
                f"{path}: no such file", f"{made}: {', '.join([UNIT_STEP, *shipped_fits()])}"
            )
        fitted = read_file(Fit, path)
        spec = _recipe_of(fitted, path, recipe, needed=max_new_tokens is None)
        note_bases = partial(note_basis, fitted, path)
    limit = max_new_tokens or (spec.serve.max_new_tokens if spec else 0)
    requests, _ = read_trace(trace_path(trace))
    if fit_lengths and spec:
        serve = spec.serve.model_copy(update={"max_new_tokens": limit})
        requests = prepare(requests, spec.model_copy(update={"serve": serve}))
    elif fit_lengths and fitted:
        requests = scale_lengths(requests, fitted.engine.max_model_len, limit)
    note_scaling(requests)
    if note_bases:
        note_bases()
    return Stage(requests, fitted, limit, kinds)


def _refuse_recipe(recipe: Path | None, why: str) -> None:
    from toolkit.errors import InputError

    if recipe is not None:
        raise InputError(f"--recipe {recipe.name} changes nothing: {why}", "leave --recipe out")


def _recipe_of(fit: Fit, path: Path, given: Path | None, *, needed: bool) -> Recipe | None:
    """The recipe that `fit` was made from: the `given` one, or where it is usually found.

    `InputError` where it is `needed` and not found, `StaleError` where `given` is another.
    """
    from toolkit.errors import InputError
    from toolkit.files.fit import Fit
    from toolkit.files.io import find_recipe, load_recipe, read_file

    if given is not None:
        read_file(Fit, path, {"recipe": given})
        return load_recipe(given)
    found = find_recipe(fit, path)
    if found is None and needed:
        raise InputError(
            f"{path}: its recipe '{fit.recipe_name}', which says how long outputs may be"
            " (serve.max_new_tokens), is not here or has changed since",
            "name the recipe with --recipe, or give the limit with --max-new-tokens",
        )
    return found


def refusal_notes(refusals: Sequence[Refusal]) -> list[str]:
    """A line that counts who can never be served, with an example; none where all can be."""
    if not refusals:
        return []
    first, count = refusals[0], len(refusals)
    who = "1 request" if count == 1 else f"{count:,} requests"
    return [f"{who} rejected; for example number {int(first.request_id) + 1}: {first.reason}"]


def world_notes(world: World, policy: str, metrics: Mapping[str, float]) -> list[str]:
    """What a reader must know before believing the figures of one simulation, of the policy of this
    name.
    """
    from toolkit.sim.world import extrapolation_warning

    lines, valid = [], world.range_of(policy)
    if valid is not None:
        warning = extrapolation_warning(metrics["extrapolated_batches_percent"], valid)
        lines += [f"warning: {warning}"] if warning else []
    return [*lines, *unfinished_notes(metrics)]


def unfinished_notes(metrics: Mapping[str, float]) -> list[str]:
    """A line that counts those whom a simulation without `drain` left; none where there are none."""
    if not metrics["unfinished"]:
        return []
    return [
        f"stopped when the last request was admitted: {metrics['unfinished']:,.0f} had not ended"
    ]
