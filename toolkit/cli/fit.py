"""`llmctl fit`: the laws of time and memory from a profile, chosen by held-out error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note, table
from toolkit.errors import TargetMissedError
from toolkit.units import number, percent, seconds

if TYPE_CHECKING:
    from toolkit.estimators.fitting import FittedLaw, FittedProfile
    from toolkit.files.fit import (
        Fit,
        HeldOutError,
        MemoryFit,
        OverheadFit,
        PartFit,
        Segment,
        SwapFit,
    )

LARGE_PERCENT = 15.0  # a held-out error above this spoils the latencies that a law predicts

ProfileArgument = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="profile.json, from `llmctl profile`.")
]
OutOption = Annotated[Path, typer.Option("--out", help="Write the fit to this file.")]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, help="Split the points into held-out parts by this seed.")
]
PointsOption = Annotated[
    bool, typer.Option("--points", help="Print the held-out error of every point, too.")
]
MaxErrorOption = Annotated[
    float | None,
    typer.Option(
        "--max-error",
        min=0.0,
        help="Exit with 4 where a law's held-out median error is above this percentage.",
    ),
]


def command(
    profile: ProfileArgument,
    out: OutOption = Path("fit.json"),
    seed: SeedOption = 0,
    points: PointsOption = False,
    max_error: MaxErrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fit the laws of time and memory to a profile, and print their errors on held-out points.

    Several forms of each law compete; the one with the least held-out error is kept and fitted to
    all points.
    """
    from toolkit.estimators.fitting import fit_file, fit_profile
    from toolkit.files.io import head, read_file, write_file
    from toolkit.files.profile import Profile

    measured = read_file(Profile, profile)
    fitted = fit_profile(measured, seed)
    fit = fit_file(
        measured, fitted, head(inputs={"profile": profile}, device=measured.environment.device)
    )
    write_file(fit, out)
    emit(as_json, fit, lambda: show(fit, fitted if points else None))
    if measured.engine.analytic:
        note(f"analytic, nothing was measured: {measured.engine.analytic}")
    found = fit.rounds.overhead.error.median_percent if fit.rounds else 0.0
    if found > LARGE_PERCENT:
        note(
            f"rounds: the held-out median error is {found:.0f} %;"
            " profile again on a quieter machine, or with more sequences"
        )
    note(f"wrote {out}")
    if max_error is not None:
        _hold_to(fit, max_error)


def show(fit: Fit, fitted: FittedProfile | None = None) -> None:
    """Print a fit for people; with `fitted` also the held-out error of every point."""
    laws = (("prefill", fit.prefill), ("decode", fit.decode))
    rows: list[tuple[object, ...]] = [
        (
            name,
            law.form,
            *_errors(law.error),
            f"N {law.valid.batch_size_max}, L {law.valid.length_max}",
        )
        for name, law in laws
    ]
    rows.append(_overhead("slice", fit.overhead, fit.workers))
    rows += _other_laws(fit)
    title = f"{fit.recipe_name}: absolute error on held-out points"
    table(["law", "form", ">median", ">p95", ">worst", "measured up to"], rows, title)
    print(f"memory: {_memory(fit.memory)}")
    if fit.rounds:
        usable = int(fit.rounds.usable_share * fit.memory.capacity_tokens)
        print(
            f"in rounds: rows x longest <= {number(usable)} tokens,"
            f" {fit.rounds.usable_share:.3f} of the capacity"
        )
    print()
    coefficients = [
        (name, *_coefficients(segment)) for name, law in laws for segment in law.segments
    ]
    columns = ["law", ">N from", ">N*L", ">N", ">L", ">1", ">N*L^2", ">at least"]
    if not any(segment.flat for segment in fit.decode.segments):
        columns = columns[:-1]
    table(
        columns,
        [line[: len(columns)] for line in coefficients],
        "coefficients in microseconds",
    )
    _show_candidates(fit)
    if fitted:
        _show_points("prefill", fitted.prefill)
        _show_points("decode", fitted.decode)


def _overhead(name: str, fit: OverheadFit, workers: int) -> tuple[object, ...]:
    """The line of what serving adds to the laws of an engine."""
    form = f"{seconds(fit.batch_s)} + {number(fit.stretch)} x laws"
    return name, form, *_errors(fit.error), f"{workers} worker{'s' * (workers != 1)} busy"


def _other_laws(fit: Fit) -> list[tuple[object, ...]]:
    """The lines of rounds, swaps, and the passes of a paged engine."""
    lines: list[tuple[object, ...]] = []
    if fit.rounds:
        lines.append(_overhead("round", fit.rounds.overhead, fit.workers))
        for name, part in (
            ("join", fit.rounds.join),
            ("leave", fit.rounds.leave),
            ("grow", fit.rounds.grow),
        ):
            lines.append((name, _terms(part), *_errors(part.error), f"{part.error.points} points"))
    if fit.swap and fit.swap.error:
        lines.append(
            ("swap", _swap(fit.swap), *_errors(fit.swap.error), f"{fit.swap.error.points} points")
        )
    if fit.steps:
        form = f"knots {', '.join(map(str, fit.steps.knots))}"
        lines.append(
            ("pass", form, *_errors(fit.steps.error), f"{fit.steps.valid.tokens_max:,} new tokens")
        )
    return lines


def _terms(part: PartFit) -> str:
    """The terms that differ from 0, in microseconds."""
    named = ((part.flat_s, ""), (part.row_s, " N"), (part.token_s, " N*L"))
    terms = [f"{number(value * 1e6)}{name}" for value, name in named if value]
    return f"{' + '.join(terms)} us" if terms else "takes no time"


def _swap(fit: SwapFit) -> str:
    out, back = (f"{rate / 1e9:.2g}" for rate in (fit.out_bytes_per_s, fit.in_bytes_per_s))
    return f"{seconds(fit.latency_s)} + {out}, {back} GB/s"


def _errors(error: HeldOutError) -> tuple[str, str, str]:
    return (
        f"{error.median_percent:.1f} %",
        f"{error.p95_percent:.1f} %",
        f"{error.worst_percent:.1f} %",
    )


def _coefficients(segment: Segment) -> tuple[str, ...]:
    values = (segment.nl, segment.n, segment.l, segment.const, segment.nll, segment.flat)
    return (str(segment.batch_size_min), *(number(value * 1e6) for value in values))


def _memory(fit: MemoryFit) -> str:
    if fit.form == "zeta":
        length = f"L * {1 + fit.workspace:.3g}" if fit.workspace else "L"
        share = f"zeta {fit.zeta:.3f} (+- {fit.zeta_std:.3f})"
        return f"N <= {share} * {number(fit.capacity_tokens)} tokens / ({length} + S)"
    rules = "; ".join(
        f"L+S > {rule.length_above}: N <= {rule.max_batch_size}" for rule in fit.rules
    )
    return f"no zeta explains the probes, so rules: {rules}"


def _show_candidates(fit: Fit) -> None:
    prefill = {tried.form: tried.error for tried in fit.prefill.candidates}
    decode = {tried.form: tried.error for tried in fit.decode.candidates}
    kept = {True: " <", False: ""}
    rows = [
        (
            form,
            *_tried(prefill.get(form), kept[form == fit.prefill.form]),
            *_tried(decode.get(form), kept[form == fit.decode.form]),
        )
        for form in prefill | decode
    ]
    columns = ["form", ">prefill", ">p95", ">decode", ">p95"]
    table(columns, rows, "forms that competed: held-out median and p95 (<: kept)")


def _tried(error: HeldOutError | None, mark: str) -> tuple[str, str]:
    return (
        (f"{error.median_percent:.1f} %", f"{error.p95_percent:.1f} %{mark}")
        if error
        else ("-", "-")
    )


def _show_points(name: str, law: FittedLaw) -> None:
    """A grid of signed errors, a row per batch size and a column per length."""
    points, predicted = law.held_out.points, law.held_out.predicted_s
    errors = {
        (int(size), int(length)): percent(100.0 * (value / measured - 1.0)).removesuffix(" %")
        for size, length, measured, value in zip(
            points.batch_size, points.length, points.seconds, predicted, strict=True
        )
    }
    lengths = sorted({length for _, length in errors})
    rows = [
        (f"N={size}", *(errors.get((size, length), "") for length in lengths))
        for size in sorted({size for size, _ in errors})
    ]
    columns = ["", *(f">L={length}" for length in lengths)]
    table(columns, rows, f"{name}: held-out prediction against measurement, percent")


def _hold_to(fit: Fit, max_error: float) -> None:
    errors = [("prefill", fit.prefill.error), ("decode", fit.decode.error)]
    if fit.rounds:
        errors.append(("rounds", fit.rounds.overhead.error))
    for name, error in errors:
        if error.median_percent > max_error:
            found = (
                f"{name}: held-out median error {error.median_percent:.1f} % is"
                f" above --max-error {max_error:g}"
            )
            raise TargetMissedError(found, "profile on a quieter machine, or with more repeats")
