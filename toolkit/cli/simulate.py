"""`llmctl simulate`: one trace under one policy, by fitted laws or in the token-step world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import JsonOption, RateOption, command_of, option
from toolkit.cli.basis import note_rest, plain
from toolkit.cli.output import emit, note, table
from toolkit.cli.results import Simulation
from toolkit.cli.stage import (
    StageOptions,
    open_stage,
    result_notes,
    sharing_notes,
    short_notes,
)
from toolkit.units import bracketed, number

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(StageOptions):
    policy: str | None = option(
        None,
        "The policy, one that `llmctl policies` lists; default: the tuning's, or the recipe's.",
        autocompletion=arguments.policy,
    )
    rate: RateOption = None
    as_json: JsonOption = False


@command_of(SimulateOptions)
def command(args: SimulateOptions) -> None:
    """Simulate a trace under a policy by the fitted laws, and print the metrics.

    --json has the metrics with their units in their names: throughput_rps, ttft_p99_s,
    batch_size_mean, ...; its `trace` describes the requests. With --fit unit-step a second is a
    decode step, as in Past-Future's Table 1; see llmctl docs reference/simulation.
    """
    from toolkit.metrics import judge
    from toolkit.sched.policies import footnote, marked
    from toolkit.sched.policies.parameters import parameters
    from toolkit.sim.api import simulate
    from toolkit.traces.windows import scale_rate

    stage = open_stage(args, args.rate)
    targets = stage.targets
    [policy] = stage.policies([args.policy] if args.policy else [], [stage.own_policy])
    [contender] = stage.contenders([policy])
    chosen = contender.policy
    world = contender.world
    requests = stage.trace if args.rate is None else scale_rate(stage.trace, args.rate)
    note_rest(requests)
    note(*sharing_notes(requests, [policy]))
    result = simulate(requests, chosen, world)
    metrics = result.metrics(targets)
    note(*result_notes(result.refusals, metrics, world.range_of(policy)))
    note(*short_notes(requests, targets, world))
    note(*filter(None, [footnote([policy], stage.engine)]))
    found = Simulation(
        policy=chosen.name,
        parameters=parameters(chosen),
        workers=world.workers,
        seed=stage.seed,
        sla=dict(targets),
        verdict=judge(result.served, targets) if targets else None,
        trace=plain(requests),
        concurrency=result.concurrency,
        **metrics,
    )

    def show() -> None:
        table(
            ["metric", "value"],
            list(metrics.items()),
            title=f"policy '{marked(policy, stage.engine)}'{bracketed(requests.changes)}",
        )
        _show_targets(found, result.sla_ratios(targets))

    emit(args.as_json, found, show)


def _show_targets(found: Simulation, ratios: Mapping[str, float]) -> None:
    """Print each target with its value, and whether all are kept; nothing without targets."""
    if found.verdict is None:
        return
    rows = [
        [name, f"{number(limit)} s", f"{number(ratios[name] * limit)} s", ratios[name] <= 1.0]
        for name, limit in found.sla.items()
    ]
    titles = {
        "kept": "all targets are kept",
        "broken": "not every target is kept",
        "overloaded": "overloaded: the queue grows with the trace",
    }
    title = f"{titles[found.verdict]}{bracketed(found.trace.changes)}"
    table(["target", ">limit", ">simulated", "kept"], rows, title)
