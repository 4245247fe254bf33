"""`llmctl simulate`: one trace, one policy, fitted laws; no model, no device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import JsonOption, SetOption, SlaOption, parse_settings, parse_sla


def command(
    trace: Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")] = "chat-small",
    fit: Annotated[Path, typer.Option(help="The fit of the engine that is simulated.")] = Path("fit.json"),
    policy: Annotated[str, typer.Option(help="The policy; see docs/policies.md.")] = "slice",
    settings: SetOption = None,
    sla: SlaOption = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; default: as profiled.")] = None,
    rate: Annotated[float | None, typer.Option(help="Scale arrivals to this many requests per second.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Limit of requests whose trace names none.")] = 256,
    fit_lengths: Annotated[bool, typer.Option(help="Scale lengths into the model's context first.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the memory edge's draws.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run a trace through a policy by the fitted laws, and print what it would give.

    The keys of --json are the metrics with their units: throughput_rps, ttft_p99_s, batch_size_mean, ...
    """
    from toolkit.cli.output import emit, note, table
    from toolkit.files.fit import Fit
    from toolkit.files.io import read_file
    from toolkit.sched.policies import make_policy
    from toolkit.sim.api import simulate, world_from_fit
    from toolkit.traces.read import read_trace
    from toolkit.traces.scale import scale_lengths, scale_rate
    from toolkit.traces.shipped import trace_path

    fitted = read_file(Fit, fit)
    requests, _ = read_trace(trace_path(trace))
    if fit_lengths:
        requests = scale_lengths(requests, fitted.engine.max_model_len, max_new_tokens)
    if rate is not None:
        requests = scale_rate(requests, rate)
    for line in requests.notes:
        note(f"trace: {line}")
    chosen = make_policy(policy, parse_settings(settings))
    world = world_from_fit(fitted, workers=workers or fitted.workers, max_new_tokens=max_new_tokens, seed=seed)
    metrics = simulate(requests, chosen, world).metrics(parse_sla(sla))
    emit(as_json, metrics, lambda: table(["metric", "value"], list(metrics.items()), title=f"policy '{policy}'"))
