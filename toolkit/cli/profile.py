"""`llmctl profile`: measure an engine as its recipe says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe
from toolkit.cli.output import emit, note, progress, table
from toolkit.errors import InputError
from toolkit.units import number, percent, seconds, size

if TYPE_CHECKING:
    from toolkit.files.profile import HitPoint, Profile, RoundsProfile
    from toolkit.profiling.run import ProfileEstimate

OutOption = Annotated[Path, typer.Option("--out", help="Write the profile to this file.")]
AnalyticOption = Annotated[
    bool,
    typer.Option(
        "--analytic",
        help="Measure nothing; compute a roofline from the recipe's hardware and model numbers.",
    ),
]
LikeOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--like",
        metavar="PROFILE RECIPE",
        help="With --analytic: take the efficiency from a measured profile of the same engine and "
        "its recipe.",
    ),
]
FreshOption = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Start from the beginning, and ignore the results of an interrupted run."
    ),
]

OTHERS_MAX_PERCENT = 10.0  # CPU use of other programs that does not yet distort the laws


def command(
    recipe: RecipeArgument,
    out: OutOption = Path("profile.json"),
    fresh: FreshOption = False,
    analytic: AnalyticOption = False,
    like: LikeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure an engine: prefills and decode steps over a grid, whole slices on all workers, and
    the memory edge.

    The same command resumes an interrupted run, even after kill -9: the measurements so far are in
    a file beside the profile until that is written.
    """
    from toolkit.backends import backend_of
    from toolkit.files.io import check_writable, write_file
    from toolkit.profiling.run import OtherLoad, journal_path, profile

    check_writable(out)
    if analytic or like:
        _profile_analytically(recipe, out, like, as_json, analytic=analytic)
        return
    others = OtherLoad()
    with ExitStack() as stack:
        loaded = open_recipe(recipe).measured
        timed = backend_of(loaded.engine.name).timed
        measured = profile(loaded, recipe, out, TerminalWatch(stack), fresh=fresh, timed=timed)
    write_file(measured, out)
    journal_path(out).unlink(missing_ok=True)
    if not measured.engine.is_server:  # the CPU time of a server would count as other programs'
        others_percent = others.percent()
        if others_percent > OTHERS_MAX_PERCENT:
            note(
                f"other programs used {others_percent:.0f} % of the CPUs meanwhile:"
                " the fitted laws will be too slow"
            )
    emit(as_json, measured, lambda: show(measured))
    note(f"wrote {out}; fit its laws with: llmctl fit {out}")


def _profile_analytically(
    recipe: Path, out: Path, like: tuple[Path, Path] | None, as_json: bool, *, analytic: bool
) -> None:
    from toolkit.files.io import head, read_file, write_file
    from toolkit.files.profile import Profile
    from toolkit.files.shipped import recipe_path
    from toolkit.profiling.analytic import analytic_profile, basis_of

    if not analytic:
        raise InputError("--like needs --analytic", "add --analytic")
    loaded = open_recipe(recipe).measured
    basis = None
    if like is not None:
        measured, made_with = like[0], recipe_path(like[1])
        basis = basis_of(
            read_file(Profile, measured, inputs={"recipe": made_with}), open_recipe(made_with)
        )
    made = analytic_profile(
        loaded, head(inputs={"recipe": recipe}, device=loaded.hardware.name), basis
    )
    write_file(made, out)
    emit(as_json, made, lambda: show(made))
    note(f"analytic, nothing was measured: {made.engine.analytic}")
    note(f"wrote {out}; fit its laws with: llmctl fit {out}")


class TerminalWatch:
    """Prints what will be measured, and draws a progress bar that ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def planned(self, plan: ProfileEstimate) -> None:
        if plan.set_aside:
            note(f"the results of an earlier run are set aside: {plan.set_aside}")
        for reason, count in plan.skipped.items():
            note(f"{_points(count)} skipped: {reason}")
        resumed = f", {plan.resumed} results of an earlier run are kept" if plan.resumed else ""
        note(
            f"{_points(plan.points)}, {plan.steps} measurements to go,"
            f" about {seconds(plan.about_s)}{resumed}"
        )
        self._advance = self._stack.enter_context(progress("measuring", plan.steps, plan.about_s))

    def advanced(self, text: str) -> None:
        self._advance(text=text)


def show(profile: Profile) -> None:
    """Print a profile for people."""
    facts = profile.engine
    threads = f", {facts.threads} thread{'s' * (facts.threads != 1)}" if facts.threads else ""
    kv_cache = f"{number(facts.capacity_tokens)} tokens ({size(facts.kv_budget_bytes)})"
    print(
        f"{profile.recipe_name}: {facts.engine} {facts.engine_version},"
        f" {facts.model_type} on {facts.device}{threads}"
    )
    if facts.deepspeed:
        print(f"DeepSpeed: {facts.deepspeed}")
    workers = f"{profile.workers} worker{'s' * (profile.workers != 1)}"
    print(f"KV cache {kv_cache}; times in {profile.clock} seconds, {workers}\n")
    grids = {
        "prefill": [
            (point.batch_size, point.input_length, point.seconds) for point in profile.prefill
        ],
        "decode step": [
            (point.batch_size, point.cached_length, point.seconds) for point in profile.decode
        ],
    }
    for name, points in grids.items():
        _show_grid(name, points)
    edges = [
        (point.input_length, point.steps, point.largest_ok, point.smallest_oom or "not reached")
        for point in profile.memory
    ]
    if edges:
        table(
            [">L", ">S", ">largest batch that ran", ">smallest that did not"], edges, "memory edge"
        )
    if facts.max_rows is not None:
        note(f"at most {facts.max_rows} requests ran at once")
    for lacking in facts.lacks:
        note(f"the server does not accept {lacking}")
    if profile.hits:
        _show_hits(profile.hits)
    if profile.rounds:
        _show_rounds(profile.rounds)
    for reason, count in Counter(point.reason for point in profile.failed).items():
        note(f"{_points(count)} not measured: {reason}")


def _show_hits(hits: Sequence[HitPoint]) -> None:
    rows: list[tuple[object, ...]] = []
    for point in hits:
        new_s, again_s = median(point.new_s), median(point.again_s)
        cached = "not said" if point.cached_tokens is None else point.cached_tokens
        saved = percent(100.0 * (again_s / new_s - 1.0))
        rows.append((point.prompt_tokens, seconds(new_s), seconds(again_s), saved, cached))
    titles = [">L", ">first token", ">sent again", ">change", ">from the cache"]
    table(titles, rows, "the same prompt twice, median: what a prefix cache saves")


def _show_rounds(rounds: RoundsProfile) -> None:
    rows: list[tuple[object, ...]] = [
        (point.part, point.rows, point.length, point.others, seconds(median(point.seconds)))
        for point in rounds.parts
    ]
    table(["part", ">rows", ">L", ">beside", ">median"], rows, "parts of rounds (grow: per step)")
    entered = [(point.input_length, point.largest_ok) for point in rounds.memory]
    table([">L", ">rows that entered"], entered, "room in rounds")
    count = sum(len(sequence.rounds) for sequence in rounds.sequences)
    print(f"{count} rounds in {len(rounds.sequences)} sequences\n")


def _points(count: int) -> str:
    return f"{count} point{'s' * (count != 1)}"


def _show_grid(name: str, points: list[tuple[int, int, list[float]]]) -> None:
    cells = {(rows, length): seconds(median(samples)) for rows, length, samples in points}
    lengths = sorted({length for _, length in cells})
    sizes = sorted({rows for rows, _ in cells})
    grid = [(f"N={rows}", *(cells.get((rows, length), "") for length in lengths)) for rows in sizes]
    table(["", *(f">L={length}" for length in lengths)], grid, f"{name}, median")
