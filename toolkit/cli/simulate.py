"""`llmctl simulate`: one trace under one policy, by fitted laws or in the token-step world."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import JsonOption, SetOption, SlaOption, parse_settings, parse_sla
from toolkit.cli.basis import FleetOption
from toolkit.cli.stage import (
    FitLengthsOption,
    FitOption,
    MaxNewTokensOption,
    RecipeOption,
    SeedOption,
    TraceOption,
    WorkersOption,
    open_stage,
    refusal_notes,
    world_notes,
)


def command(
    trace: TraceOption = "chat-small",
    fit: FitOption = "fit.json",
    recipe: RecipeOption = None,
    fleet: FleetOption = None,
    policy: Annotated[
        str,
        typer.Option(
            autocompletion=completion.policy,
            help="The policy; see docs/explanation/policies.md.",
        ),
    ] = "slice",
    settings: SetOption = None,
    sla: SlaOption = None,
    workers: WorkersOption = None,
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None,
    max_new_tokens: MaxNewTokensOption = None,
    fit_lengths: FitLengthsOption = True,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics.

    --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see docs/reference/simulation.md.
    """
    from toolkit.cli.basis import note_rest, plain
    from toolkit.cli.output import emit, note, table
    from toolkit.cli.results import Simulation
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sched.policies.servable import footnote, marked
    from toolkit.sim.api import simulate
    from toolkit.sim.world import assign_settings, check_capacity, policy_for
    from toolkit.traces.windows import scale_rate

    of_world, of_policy = assign_settings([policy], parse_settings(settings))
    targets = parse_sla(sla)
    stage = open_stage(trace, fit, max_new_tokens, fit_lengths, fleet, recipe)
    requests = stage.trace if rate is None else scale_rate(stage.trace, rate)
    chosen = policy_for(stage.fit, policy, of_policy[policy])
    world = stage.world(of_world, workers, seed)
    check_capacity(of_world, world, requests)
    note_rest(requests)
    result = simulate(requests, chosen, world)
    metrics = result.metrics(targets)
    for line in [*refusal_notes(result.refusals), *world_notes(world, policy, metrics)]:
        note(line)
    name, remark = marked(policy, stage.engines), footnote([policy], stage.engines)
    if remark:
        note(remark)
    found = Simulation(
        policy=chosen.name,
        parameters=parameters(chosen),
        workers=world.size,
        seed=seed,
        sla=targets,
        trace=plain(requests),
        **metrics,
    )
    emit(
        as_json,
        found,
        lambda: table(["metric", "value"], list(metrics.items()), title=f"policy '{name}'"),
    )
