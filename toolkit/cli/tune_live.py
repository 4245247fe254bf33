"""`llmctl tune --live`: the search on a running server, from the command line."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from toolkit.cli.arguments import keep_inputs, refuse_useless
from toolkit.cli.basis import note_trace, warn
from toolkit.cli.output import emit, note, progress, table
from toolkit.cli.scenario import Scenario
from toolkit.cli.settings import LOCAL, control_of
from toolkit.errors import InputError
from toolkit.files.io import check_writable, head, write_file
from toolkit.files.live import LiveTuning
from toolkit.files.tuning import NO_OUTCOME
from toolkit.interrupts import EXIT_CODE, InterruptedReplayError
from toolkit.report.parts import Cell
from toolkit.units import seconds

if TYPE_CHECKING:
    from toolkit.cli.tune import TuneOptions

OUT = Path("tuning.json")  # the default of `llmctl tune`, which has another form
LIVE_OUT = Path("live-tuning.json")
PLAN_OUT = "live-plan.json"  # beside it
API_KEY_VARIABLE = "LLMCTL_API_KEY"
HERE = "here"
WINDOWS = 4
BURSTS = 200  # that a search's time is for
SHOWN = 8
FIRST_LEASE_S = 120.0  # until the search begins
WINDOW_S = (1.5, 30.0)


def tune_live(args: TuneOptions) -> None:
    """Search on a running server; see `toolkit.live.search`."""
    from toolkit.bench.session import RequestSettings, prepare_replay, unused_seed
    from toolkit.endpoints.target import find_target
    from toolkit.live.search import Bursts, LiveSearch
    from toolkit.sched.policies.vllm import VllmPolicy
    from toolkit.sim.deployment import Deployment, Workload
    from toolkit.traces.windows import fit_windows

    refuse_useless(
        {
            "--policies": args.policies, "--routers": args.routers, "--trials": args.trials,
            "--workers": args.workers, "--load": args.load, "--concurrency": args.concurrency,
            "--sla": args.sla[0] if args.sla else None, "--fit": args.fit,
        },
        "--live tries the flags of one running vLLM",
    )  # fmt: skip
    out = LIVE_OUT if args.out == OUT else args.out
    plan_out = out.with_name(PLAN_OUT)
    for file in (out, plan_out):
        check_writable(file)
    scenario = Scenario.of_plan(replace(args, plan=args.recipe))
    plan = scenario.plan
    assert plan is not None
    inputs = {"plan": args.recipe}
    keep_inputs({**inputs, "out": out, "plan_out": plan_out})
    if plan.settings.policy != VllmPolicy.name or plan.workers != 1:
        raise InputError(
            f"--live tunes vLLM's own scheduler on one server; the plan has policy "
            f"'{plan.settings.policy}' on {plan.workers}",
            "tune it offline: llmctl tune RECIPE",
        )
    recipe = plan.recipe
    trace = scenario.read_trace()
    inputs |= {"trace": scenario.trace_file}
    owner = f"llmctl tune --live (process {os.getpid()} on {platform.node()})"
    control = control_of(LOCAL if args.live in (None, HERE) else args.live, owner)
    control.hold(FIRST_LEASE_S)  # a server without a control, or with another tuner, is named first
    target = find_target(control.url, None, os.environ.get(API_KEY_VARIABLE, ""))
    rate = args.rate or recipe.tune.request_rate_rps
    settings = RequestSettings(rate, seed=unused_seed(), loop="open")
    setup = prepare_replay(target, trace, plan, settings, warn if args.force else None)
    window_s = min(max(60.0 * args.minutes / BURSTS, WINDOW_S[0]), WINDOW_S[1])
    cut = fit_windows(setup.trace, window_s, WINDOWS, 0, recipe.tune.seed)
    note_trace(cut.trace)
    bursts = Bursts(target, setup.load, cut.search, recipe.sla, cut.seconds)
    world = Deployment.of_plan(plan).world(Workload(setup.trace))
    with ExitStack() as stack:
        advance = stack.enter_context(progress("measuring", BURSTS, alone=True))
        search = LiveSearch(
            control=control,
            bursts=bursts,
            planned=plan.settings.parameters,
            world=world,
            budget_s=60.0 * args.minutes,
            seed=scenario.seed,
            note=note,
            advanced=lambda text: advance(text=text),
        )
        try:
            search.run()
        except InterruptedReplayError:
            note("interrupted: the server has the settings of before")
            raise typer.Exit(EXIT_CODE) from None
    result = search.result(head(inputs), recipe.name, args.minutes)
    write_file(result, out)
    chosen = result.best if result.applied else result.start
    parameters = plan.settings.parameters | chosen
    found = plan.settings.model_copy(update={"parameters": parameters})
    made = plan.model_copy(update={"settings": found, "outcome": NO_OUTCOME, "explained": {}})
    write_file(made, plan_out)
    emit(args.as_json, result, lambda: _show(result))
    note(f"wrote {out}, and {plan_out}, which starts with the settings that it has now")


def _show(result: LiveTuning) -> None:
    """Print the result for people."""
    from toolkit.sched.policies.vllm import FLAGS

    names = list(result.start)
    ranked = sorted(result.trials, key=lambda trial: (-trial.rounds, -trial.first.score))
    rows: list[list[Cell]] = [
        [
            f"{number}",
            *(trial.settings[name] for name in names),
            trial.rounds,
            trial.first.goodput_rps,
            trial.predicted.goodput_rps,
        ]
        for number, trial in enumerate(ranked[:SHOWN], start=1)
    ]
    columns = ["", *(f">{FLAGS[name].word or name}" for name in names)]
    columns += [">rounds", ">goodput", ">predicted"]
    spent = f"{len(result.trials)} settings in {result.bursts} bursts, {seconds(result.spent_s)}"
    table(columns, rows, f"{spent}: goodput of the first burst, requests/s")
    gain = result.gain
    words = ", ".join(f"{name}={value}" for name, value in result.best.items())
    if gain is None:
        print("no settings were measured often enough to say that they are better")
    else:
        share = f"{gain.percent:+.1f} % ({gain.low_percent:+.1f} to {gain.high_percent:+.1f})"
        print(f"gain over the settings of the start, 95 %: {share}, {gain.blocks} blocks")
    if result.sure:
        print(f"the server has now: {words}")
    else:
        print("no gain is sure: the server has the settings of before")
        if result.best != result.start:
            print(f"the best so far, which longer --minutes may confirm: {words}")
    error = result.prediction
    off = f"TTFT {error.ttft_percent:.0f} %, E2E {error.e2e_percent:.0f} % off (median)"
    print(f"predictions: {off}, rank correlation {error.rank_correlation:.2f}")
