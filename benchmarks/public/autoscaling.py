"""Published runs of autoscalers beside the same rules in the simulator.

Runs: the benchmark page of github.com/deanlorenz/llm-d-workload-variant-autoscaler at 2976e4ee,
Qwen3-32B on one H100 a replica, GuideLLM with Poisson arrivals at 20 requests/s for 600 s, three
runs each; their means stand in `RUNS`. 20 requests/s are far above what ten replicas serve, and
GuideLLM has at most 512 requests under way, so this load is a closed loop of 512, which all begin
here at once (there within 26 s). At 600 s the clients leave; percentiles are over the requests that
were complete then.

What its pages do not say is assumed, and varied: how much memory vLLM had beside the weights, and
which stabilization was in force: they say two things. Runs of WVA lost thousands of requests,
probably to a time-out of 60 s in the client. Such clients are not modelled, so only replicas are
compared.

    python -m benchmarks.public.autoscaling
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.cli.arguments import open_recipe
from toolkit.files.io import head
from toolkit.files.recipe import Recipe, RouterSpec, ScaleSpec, ScalingSpec, VllmSpec
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Settings
from toolkit.profiling.analytic import analytic_fit
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.types import Trace

RECIPE = "qwen3-32b-h100-sxm-tp2"
LOAD_S = 600.0
WATCHED_S = 665.0  # in which replicas were counted: the harness works on after the load
AT_ONCE = 512
REQUESTS = 2_600  # more than any of these fleets serves in that time
# Kubernetes' HPA on two external metrics, one pod in 180 s
HPA = ScalingSpec(
    rule="keda",
    parameters={"waiting": 2.0, "kv_usage": 0.7},
    behaviour={"up_pods": 1, "up_percent": 0, "up_period_s": 180.0},
)
# the means of the pool; its behaviour was not in force, so Kubernetes' own
KEDA = ScalingSpec(
    rule="keda",
    parameters={"waiting": 2.0, "kv_usage": 0.7, "pool_mean": True},
    behaviour={},
)
WVA = ScalingSpec(
    rule="saturation",
    parameters={},
    behaviour={
        "up_pods": 10, "up_percent": 0, "up_period_s": 150.0,
        "down_window_s": 240.0, "down_pods": 10, "down_percent": 0, "down_period_s": 150.0,
    },
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """One set-up, as published: means of three runs. Times in seconds.

    Attributes:
        ttft_p99_s: None where clients gave up after 60 s, which is not modelled.
    """

    load: str
    control: str
    scaling: ScalingSpec
    prompt: int
    output: int
    begin: int
    start_s: float
    ttft_p99_s: float | None
    itl_p99_s: float | None
    replicas_mean: float
    replicas_max: int
    poll_s: float = 15.0


def static(count: int) -> ScalingSpec:
    return ScalingSpec(rule="static", parameters={"replicas": count}, behaviour={})


RUNS = (
    Published("prefill", "static 2", static(2), 4000, 1000, 2, 93, 555.3, 0.0582, 2.0, 2),
    Published("prefill", "HPA", HPA, 4000, 1000, 1, 130, 555.5, 0.0591, 2.30, 4),
    Published("prefill", "KEDA", KEDA, 4000, 1000, 1, 104, 506.9, 0.0587, 7.42, 10),
    Published("prefill", "WVA v1", WVA, 4000, 1000, 1, 110, None, None, 1.73, 3, 60.0),
    Published("decode", "static 2", static(2), 1000, 4000, 2, 97, 356.6, 0.1138, 2.0, 2),
    Published("decode", "HPA", HPA, 1000, 4000, 1, 128, 356.9, 0.1133, 2.21, 4),
    Published("decode", "KEDA", KEDA, 1000, 4000, 1, 102, 408.2, 0.1069, 8.22, 10),
    Published("decode", "WVA v1", WVA, 1000, 4000, 1, 109, None, None, 1.84, 3, 60.0),
    Published("even", "static 2", static(2), 1000, 1000, 2, 97, 507.5, 0.0705, 2.0, 2),
    Published("even", "HPA", HPA, 1000, 1000, 1, 125, 518.3, 0.0705, 2.32, 4),
    Published("even", "KEDA", KEDA, 1000, 1000, 1, 108, 494.8, 0.0654, 7.45, 10),
    Published("even", "WVA v1", WVA, 1000, 1000, 1, 103, None, None, 1.70, 3, 60.0),
)


@dataclass(frozen=True, slots=True)
class Assumed:
    """What the pages do not say."""

    words: str
    utilization: float = 0.95  # as given; vLLM's own use of the rest is not
    eager: bool = True  # as given
    window_s: float | None = None  # of the way up; None: as in `Published.scaling`


ASSUMED = (
    Assumed("as published"),
    Assumed("0.93 of the memory", utilization=0.93),
    Assumed("with CUDA graphs", eager=False),
    Assumed("up window 120 s", window_s=120.0),
)


def recipe_of(run: Published, assumed: Assumed) -> Recipe:
    """Return the published deployment."""
    base = open_recipe(recipe_path(RECIPE))
    engine = base.engine.model_copy(
        update={
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": assumed.utilization,
            "vllm": VllmSpec(enforce_eager=assumed.eager),
        }
    )
    scale = ScaleSpec(
        min=1, max=10, start_s=[run.start_s], scrape_s=30.0, poll_s=run.poll_s, scaling=run.scaling
    )
    model = base.model.model_copy(update={"max_model_len": 16_000})
    serve = base.serve.model_copy(update={"max_new_tokens": run.output})
    update = {"engine": engine, "model": model, "scale": scale, "serve": serve}
    return base.model_copy(update=update | {"workers": run.begin})


def simulated(run: Published, assumed: Assumed) -> SimResult:
    """Serve the published load under the published rule."""
    recipe = recipe_of(run, assumed)
    fit = analytic_fit(recipe.measured, head(inputs={}, device=recipe.hardware.name))
    lengths = np.full(REQUESTS, run.prompt), np.full(REQUESTS, run.output)
    trace = Trace(np.zeros(REQUESTS), *lengths, lengths[1], source=run.load)
    own = Deployment.of(recipe, fit)
    scaling = run.scaling
    if assumed.window_s is not None:
        behaviour = {**scaling.behaviour, "up_window_s": assumed.window_s}
        scaling = scaling.model_copy(update={"behaviour": behaviour})
    settings = Settings(
        policy=own.settings.policy,
        parameters=own.settings.parameters,
        replica_router=RouterSpec(name="llm-d", parameters={}),
        scaling=scaling,
    )
    deployment = replace(own, settings=settings)
    return simulate(trace, deployment.policy(), deployment.world(Workload(trace, AT_ONCE)))


def row_of(run: Published, assumed: Assumed) -> str:
    """Return a line of the table: simulated (published) figures."""
    result = simulated(run, assumed)
    served = result.served
    done = served.ok & (served.finish_s <= LOAD_S)
    ttft_s = np.percentile((served.first_token_s - served.arrival_s)[done], 99)
    tpot_s = (served.finish_s - served.first_token_s)[done] / (run.output - 1)
    log = result.fleet
    assert log is not None
    log.end_s = WATCHED_S
    cells = [
        run.load,
        run.control,
        assumed.words,
        _beside(ttft_s, run.ttft_p99_s, 0),
        _beside(1e3 * np.percentile(tpot_s, 99), run.itl_p99_s and 1e3 * run.itl_p99_s, 1),
        _beside(log.mean(("ready",)), run.replicas_mean, 2),
        f"{log.most(('ready',))} ({run.replicas_max})",
    ]
    return f"| {' | '.join(cells)} |"


def _beside(value: float, published: float | None, digits: int) -> str:
    """A simulated value, the published one and the difference."""
    if published is None:
        return "not compared"
    return f"{value:.{digits}f} ({published:.{digits}f}, {100 * (value / published - 1):+.0f} %)"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--varied", action="store_true", help="also under other assumptions")
    args = parser.parse_args()
    print(
        "| load | control | assumed | P99 TTFT, s | P99 TPOT, ms | replicas, mean | most |\n"
        "|---|---|---|---|---|---|---|"
    )
    for assumed in ASSUMED if args.varied else ASSUMED[:1]:
        for run in RUNS:
            if assumed.window_s is None or run.scaling.rule != "static":
                print(row_of(run, assumed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
