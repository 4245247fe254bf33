"""`llmctl simulate`: one trace under one policy, by fitted laws or in the token-step world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import JsonOption, command_of, parse_settings, parse_sla
from toolkit.cli.stage import StageOptions, open_stage, refusal_notes, world_notes


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(StageOptions):
    """The command line of `llmctl simulate`."""

    policy: Annotated[
        str,
        typer.Option(autocompletion=completion.policy, help="The policy; see docs/policies.md."),
    ] = "slice"
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None
    as_json: JsonOption = False


@command_of(SimulateOptions)
def command(given: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics.

    --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see docs/simulating.md.
    """
    from toolkit.cli.basis import note_rest, plain
    from toolkit.cli.output import emit, note, table
    from toolkit.cli.results import Simulation
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sched.policies.servable import footnote, marked
    from toolkit.sim.api import simulate
    from toolkit.sim.world import assign_settings, check_capacity, policy_for
    from toolkit.traces.windows import scale_rate

    of_world, of_policy = assign_settings([given.policy], parse_settings(given.settings))
    targets = parse_sla(given.sla)
    stage = open_stage(given)
    requests = stage.trace if given.rate is None else scale_rate(stage.trace, given.rate)
    chosen = policy_for(stage.fit, given.policy, of_policy[given.policy])
    world = stage.world(of_world, given.workers, given.seed)
    check_capacity(of_world, world, requests)
    note_rest(requests)
    result = simulate(requests, chosen, world)
    metrics = result.metrics(targets)
    for line in [*refusal_notes(result.refusals), *world_notes(world, given.policy, metrics)]:
        note(line)
    name, remark = marked(given.policy, stage.engines), footnote([given.policy], stage.engines)
    if remark:
        note(remark)
    found = Simulation(
        policy=chosen.name,
        parameters=parameters(chosen),
        workers=world.size,
        seed=given.seed,
        sla=targets,
        trace=plain(requests),
        **metrics,
    )
    emit(
        given.as_json,
        found,
        lambda: table(["metric", "value"], list(metrics.items()), title=f"policy '{name}'"),
    )
