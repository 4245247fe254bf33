"""`llmctl profile` and `fit`: measure an engine as its recipe says, and fit the laws of time and
memory to that, chosen by held-out error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from toolkit.cli.arguments import (
    JsonOptions,
    RecipeArgument,
    argument,
    command_of,
    open_recipe,
    option,
    recipes,
    refuse_useless,
    resolve_recipe,
)
from toolkit.cli.basis import analytic_notes
from toolkit.cli.output import emit, note, progress, show, table
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.report.parts import Sheet
from toolkit.report.rows import fit_table
from toolkit.report.steps import OWN_TRAFFIC, fit_option, recipe_of, typed
from toolkit.units import counted, number, seconds, size

if TYPE_CHECKING:
    from toolkit.profiling.run import ProfileWork

OTHERS_MAX_PERCENT = 10.0  # CPU use of other programs that does not yet distort the laws
LARGE_PERCENT = 10.0  # above it, the median error of a law is named with a remedy


@dataclass(frozen=True, slots=True)
class ProfileOptions(JsonOptions):
    recipe: RecipeArgument
    out: Path = option(Path("profile.json"), "Write the profile to this file.")
    analytic: bool = option(
        False,
        "Measure nothing; compute the passes of vLLM on a GPU from its measured operators.",
    )
    drafts: int | None = option(
        None,
        "Of vLLM with speculative decoding: drafts of a row in a pass, in place of the recipe's; "
        "0: none.",
        min=0,
    )


@command_of(ProfileOptions)
def profile(args: ProfileOptions) -> None:
    """Measure an engine: prefills and decode steps over a grid, whole slices on all workers, and
    the memory edge.

    The same command resumes an interrupted run, even after kill -9: the measurements so far are in
    OUT.partial until the profile is written.
    """
    from toolkit.backends import backend_of
    from toolkit.profiling.analytic import analytic_profile
    from toolkit.profiling.run import OtherLoad, journal_path
    from toolkit.profiling.run import profile as measure

    loaded = open_recipe(args.recipe).measured
    others = OtherLoad()
    if args.analytic:
        made_from = head(inputs={"recipe": args.recipe}, device=loaded.hardware.name)
        measured = analytic_profile(loaded, made_from)
    else:
        loaded = _with_drafts(loaded, args.drafts)
        timed = backend_of(loaded.engine.name).timed
        with ExitStack() as stack:
            measured = measure(loaded, args.recipe, args.out, TerminalWatch(stack), timed=timed)
    write_file(measured, args.out)
    journal_path(args.out).unlink(missing_ok=True)
    # the CPU time of a server would count as other programs'
    others_percent = others.percent()
    if not (measured.engine.is_server or args.analytic) and others_percent > OTHERS_MAX_PERCENT:
        used = f"other programs used {others_percent:.0f} % of the CPUs meanwhile"
        note(f"{used}: the fitted laws will be too slow")
    emit(args.as_json, measured, lambda: show_profile(measured))
    note(*analytic_notes(measured.engine), f"wrote {args.out}", f"next: {typed('fit', args.out)}")


def _with_drafts(recipe: Recipe, tokens: int | None) -> Recipe:
    """Return the recipe with `tokens` drafts of a row in a pass; None: with its own number."""
    if tokens is None:
        return recipe
    policy = recipe.policy
    if policy.name != "vllm":
        raise InputError(
            f"--drafts {tokens}: policy '{policy.name}' of recipe '{recipe.name}' has none",
            "set policy.name to vllm, or leave it out",
        )
    parameters = policy.parameters | {"num_speculative_tokens": tokens}
    changed = policy.model_copy(update={"parameters": parameters})
    return recipe.model_copy(update={"policy": changed})


@dataclass(frozen=True, slots=True)
class FitOptions(JsonOptions):
    profile: Path | None = argument("profile.json, from `llmctl profile`.", None, metavar="PROFILE")
    also: list[Path] | None = option(
        None,
        "A profile of the same recipe with another number of drafts (`profile --drafts`); "
        "repeatable.",
        metavar="PROFILE",
    )
    out: Path = option(Path("fit.json"), "Write the fit to this file.")
    from_log: Path | None = option(
        None,
        "Instead of a profile: the passes that a server of engine vllm made for its own traffic "
        "(`llmctl serve --pass-log`). Needs --recipe.",
        metavar="LOG",
    )
    recipe: Path | None = option(
        None, "The recipe of that server.", callback=resolve_recipe, autocompletion=recipes
    )


@command_of(FitOptions)
def fit(args: FitOptions) -> None:
    """Fit the laws of time and memory to a profile, and print their errors on held-out points.

    Each law is a sum of terms; those that the profile does not show are 0. --from-log needs no
    profile: it says which terms the server's traffic does not show, and refuses a log that shows
    too little.
    """
    from toolkit.estimators.fitting import fit_profile, laws_of_drafts
    from toolkit.files.modelled import refuse_fit

    measured, inputs = _measured(args)
    made_from = head(inputs=inputs, device=measured.environment.device)
    made = fit_profile(measured, made_from)
    refuse_fit(made)
    if args.also:
        others = [read_file(Profile, path) for path in args.also]
        made = made.model_copy(update={"drafts": laws_of_drafts(measured, others)})
    if args.from_log is not None:
        from toolkit.backends.vllm.from_log import with_pass_errors

        made = with_pass_errors(made)
    write_file(made, args.out)
    emit(args.as_json, made, lambda: show_fit(made))
    note(*analytic_notes(measured.engine))
    passes = made.steps
    if passes and passes.async_scheduling and not (passes.launches or measured.engine.analytic):
        found = passes.error.median_percent
        note(
            "passes overlap, and this profile does not say how they were launched: fitted by their "
            f"ends alone, {found:.0f} % off (held-out median); profile again for their own law"
        )
    note(*far_off(made))
    recipe = recipe_of(made, args.out.parent)
    command = typed("tune", recipe, *fit_option(recipe, args.out))
    note(f"wrote {args.out}", f"next: {command}", OWN_TRAFFIC)


def _measured(args: FitOptions) -> tuple[Profile, dict[str, Path]]:
    """What is fitted, and the files that it comes from."""
    if args.from_log is None:
        if args.profile is None:
            raise InputError("fit needs a profile", "llmctl fit PROFILE, or --from-log LOG")
        refuse_useless({"--recipe": args.recipe}, "a profile names its recipe")
        return read_file(Profile, args.profile), {"profile": args.profile}
    if args.profile is not None:
        raise InputError("both a profile and --from-log are given", "keep one of them")
    if args.recipe is None:
        raise InputError("--from-log needs the server's recipe", "add --recipe RECIPE")
    from toolkit.backends.vllm.from_log import profile_of_log, read_passes

    recipe = open_recipe(args.recipe)
    if not traits_of(recipe.engine.name).timed_by_pass:
        raise InputError(
            f"--from-log: engine {recipe.engine.name} writes no passes", "it is for engine vllm"
        )
    history = read_passes(args.from_log)
    inputs = {"recipe": args.recipe, "log": args.from_log}
    made, shown = profile_of_log(recipe, history, head(inputs))
    note(f"{shown.passes:,} passes of the log, {shown.points:,} points")
    if shown.absent:
        note(f"no pass of it has {', '.join(shown.absent)}: the law takes these as 0")
    if shown.unsure:
        note(f"this traffic does not tell apart {', '.join(shown.unsure)}")
    note("the front is not in a log of passes: predicted latencies are those at the engine")
    return made, inputs


class TerminalWatch:
    """Prints what will be measured, and draws a progress bar that ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def planned(self, plan: ProfileWork) -> None:
        if plan.set_aside:
            note(f"the results of an earlier run are set aside: {plan.set_aside}")
        for reason, count in plan.skipped.items():
            note(f"{counted(count, 'point')} skipped: {reason}")
        resumed = f", {plan.resumed} results of an earlier run are kept" if plan.resumed else ""
        note(f"{counted(plan.points, 'point')}, {plan.steps} measurements to go{resumed}")
        self._advance = self._stack.enter_context(progress("measuring", plan.steps))

    def advanced(self, text: str) -> None:
        self._advance(text=text)


def _show_grid(title: str, cells: Mapping[tuple[int, int], str]) -> None:
    """A table of cells by batch size N and length L."""
    lengths = sorted({length for _, length in cells})
    sizes = sorted({rows for rows, _ in cells})
    grid = [(f"N={rows}", *(cells.get((rows, length), "") for length in lengths)) for rows in sizes]
    table(["", *(f">L={length}" for length in lengths)], grid, title)


def show_profile(measured: Profile) -> None:
    """Print a profile for people."""
    facts = measured.engine
    threads = f", {counted(facts.threads, 'thread')}" if facts.threads else ""
    kv_cache = f"{number(facts.capacity_tokens)} tokens ({size(facts.kv_budget_bytes)})"
    engine = f"{facts.engine} {facts.engine_version}, {facts.model_type} on {facts.device}"
    print(f"{measured.recipe_name}: {engine}{threads}")
    workers = counted(measured.workers, "worker")
    if measured.steps and measured.steps.resolved:
        print(f"measured with {measured.steps.resolved.words(facts.dtype)}")
    print(f"KV cache {kv_cache}; times in {measured.clock} seconds, {workers}\n")
    prefill = {(p.batch_size, p.input_length): median(p.seconds) for p in measured.prefill}
    decode = {(p.batch_size, p.cached_length): median(p.seconds) for p in measured.decode}
    for name, times in (("prefill", prefill), ("decode step", decode)):
        _show_grid(f"{name}, median", {key: seconds(time_s) for key, time_s in times.items()})
    edges = [
        (point.input_length, point.steps, point.largest_ok, point.smallest_oom or "not reached")
        for point in measured.memory
    ]
    if edges:
        columns = [">L", ">S", ">largest batch that ran", ">smallest that did not"]
        table(columns, edges, "memory edge")
    if facts.max_rows is not None:
        note(f"at most {facts.max_rows} requests ran at once")
    for lacking in facts.lacks:
        note(f"the server does not accept {lacking}")
    for reason, count in Counter(point.reason for point in measured.failed).items():
        note(f"{counted(count, 'point')} not measured: {reason}")


def show_fit(fit: Fit) -> None:
    """Print the laws of a fit with their errors, and the edge of memory."""
    show(Sheet("fit", "", tables=[fit_table(fit)]))
    memory = fit.memory
    if memory.form == "zeta":
        length = f"L * {1 + memory.workspace:.3g}" if memory.workspace else "L"
        share = f"zeta {memory.zeta:.3f} (+- {memory.zeta_std:.3f})"
        edge = f"N <= {share} * {number(memory.capacity_tokens)} tokens / ({length} + S)"
    else:
        rules = [f"L+S > {rule.length_above}: N <= {rule.max_batch_size}" for rule in memory.rules]
        edge = f"no zeta explains the probes, so rules: {'; '.join(rules)}"
    print(f"memory: {edge}")


def far_off(made: Fit) -> list[str]:
    """Return a line on each law with a large error."""
    errors = {"prefill": made.prefill.error, "decode": made.decode.error}
    if made.rounds:
        errors["rounds"] = made.rounds.overhead.error
    remedy = "profile on a quieter machine, or with more repeats"
    return [
        f"{name}: the held-out median error is {error.median_percent:.0f} %; {remedy}"
        for name, error in errors.items()
        if error.median_percent > LARGE_PERCENT
    ]
