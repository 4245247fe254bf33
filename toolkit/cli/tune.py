"""`llmctl tune`: search the scheduler's parameters on a trace, with the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption, RecipeArgument, open_recipe

if TYPE_CHECKING:
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Tuning


def command(
    recipe: RecipeArgument,
    fit: Annotated[Path, typer.Option(help="The fit of this recipe's engine.")] = Path("fit.json"),
    trace: Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")] = "chat-small",
    out: Annotated[Path, typer.Option(help="Where to write the result.")] = Path("tuning.json"),
    trials: Annotated[int | None, typer.Option(min=1, help="Trials; default: the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed; default: the recipe's. Same seed, same bytes.")] = None,
    rate: Annotated[float | None, typer.Option(help="Scale arrivals to this many requests per second.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Search the scheduler's parameters on windows of a trace, and judge the best on other windows.

    Trial 0 is the recipe's own policy. What is found is a gain over it on windows that the search never saw, or the
    advice to keep it. An interrupted search goes on where it was.
    """
    from toolkit.cli.output import emit, note, progress
    from toolkit.files.fit import Fit
    from toolkit.files.io import head, read_file, write_file
    from toolkit.traces.read import read_trace
    from toolkit.traces.shipped import trace_path
    from toolkit.tuning.memo import Remembering
    from toolkit.tuning.tune import make_workload, make_world, tune

    spec = _with_options(open_recipe(recipe), trials, seed, rate)
    fitted = read_file(Fit, fit, {"recipe": recipe})
    requests, _ = read_trace(trace_path(trace))
    workload = make_workload(spec, fitted, requests)
    for line in workload.trace.notes:
        note(f"trace: {line}")
    made_from = head({"recipe": recipe, "fit": fit, "trace": trace_path(trace)})
    fingerprint = "".join(source.sha256 for source in made_from["inputs"].values()) + spec.model_dump_json()
    memo: list[Remembering] = []

    def remember(bench):  # type: ignore[no-untyped-def]
        memo.append(Remembering(bench, Path(f"{out}.partial"), fingerprint))
        return memo[0]

    with progress("tuning", spec.tune.trials) as advance:
        result = tune(
            spec,
            workload,
            make_world(spec, fitted),
            made_from,
            lambda _done, _of, best: advance(text=f"best {best:.3g} good requests/s"),
            remember,
        )
    write_file(result, out)
    memo[0].forget()
    emit(as_json, result, lambda: _render(result, out))


def _with_options(recipe: Recipe, trials: int | None, seed: int | None, rate: float | None) -> Recipe:
    given = {"trials": trials, "seed": seed, "request_rate_rps": rate}
    changed = {key: value for key, value in given.items() if value is not None}
    return recipe.model_copy(update={"tune": recipe.tune.model_copy(update=changed)})


METRICS = (
    "goodput_rps",
    "throughput_rps",
    "sla_attainment_percent",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_mean_s",
    "e2e_p95_s",
    "batch_size_mean",
    "oom_percent",
)


def _render(result: Tuning, out: Path) -> None:
    from toolkit.cli.output import number, table

    before, after = result.defaults_held_out, result.best_held_out
    table(
        ["parameter", "default", "best"],
        [[name, before.parameters[name], value] for name, value in after.parameters.items()],
        title=f"policy '{after.policy}', {len(result.trials)} trials at {number(result.request_rate_rps)} requests/s",
    )
    table(
        ["metric", "default", "best", ">change"],
        [[name, before.metrics[name], after.metrics[name], _change(before.metrics[name], after.metrics[name])]
         for name in METRICS if name in before.metrics and name in after.metrics],
        title=f"predicted on {len(result.held_out_windows)} held-out windows",
    )  # fmt: skip
    table(
        ["parameter", ">goodput swing", "over"],
        [
            [one.parameter, f"{one.swing_percent:.1f} %", f"{number(one.values[0])} .. {number(one.values[-1])}"]
            for one in result.sensitivity
        ],
        title="how sensitive: goodput when one parameter moves over its range",
    )
    if result.binding_sla and result.binding_ratio is not None:
        state = "missed" if result.binding_ratio > 1 else "met"
        print(f"the target that binds: {result.binding_sla}, {state}, at {result.binding_ratio:.0%} of its limit")
    if result.keep_defaults:
        print("keep the defaults: nothing better was found on the held-out windows")
    elif result.gain_percent is not None:
        print(f"gain over the defaults, held out: {result.gain_percent:+.1f} % goodput")
    print(f"wrote {out}")


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.1f} %" if before else "-"
