"""Tables and figures of the SCLS paper in the simulator, beside the paper's figures.

    python -m benchmarks.papers.scls_figures [--seeds 3] [--processes 2]

Takes half a minute per seed on two shared, busy cores. Needs nothing but the package.

The paper's trace and its fitted laws are not public. The setting here is that of the independent
simulation with the gains beside: Poisson arrivals for 600 s, prompts lognormal(400, 1), outputs
lognormal(120, 0.75), both up to 1,024 tokens (`llmctl trace generate --longest 1024 --seed K`); 8
workers; laws for transformers that give both times of Fig. 11, and 33,792 tokens of KV cache;
assumed laws for DeepSpeed, and the paper's Algorithm 2. The rates and slice lengths are ours, since
the text of the paper does not give the figures' axes. Tokens reach clients with their batch, as in
the paper.

ILS (DeepSpeed-FastGen) is `conservative` on DeepSpeed's laws, which include padding; a paged engine
would not pad. The paper does not say how many tokens its cache held: ILS runs once with the 22,528
that Algorithm 2 allows at most, and once with 33,792.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.common.command import make_parser, over_seeds
from benchmarks.common.results_file import markdown
from benchmarks.common.samples import bilinear_law
from toolkit.estimators.laws import LinearLaw
from toolkit.estimators.memory import RuleMemory, ZetaMemory
from toolkit.files.fit import BatchRule
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.generate import Arrivals, Lengths, generate
from toolkit.traces.types import Trace

HF_LAW = bilinear_law(p=(1.3e-4, 1e-3, 1e-5, 0.03), d=(3.5421e-6, 2e-4, 5e-7, 0.022956))
DS_LAW = bilinear_law(p=(1e-4, 5e-4, 5e-6, 0.02), d=(1e-6, 2e-4, 3e-7, 0.0165))
PAGED = ZetaMemory(33_792)
# Algorithm 2: LLaMA2-13B under DeepSpeed on 80 GB, L + S <= 2048
DEEPSPEED_RULES = (
    BatchRule(length_above=1024, max_batch_size=12),
    BatchRule(length_above=512, max_batch_size=22),
    BatchRule(length_above=0, max_batch_size=28),
)
EAGER: dict[str, Value] = {"memory_reserve": 0.0}
PAPER = EAGER | {"eager": False}
COMMAND = "python -m benchmarks.papers.scls_figures"
CHOSEN = "the laws were chosen to give 13.5 and 7.6"
RATES = (5, 10, 20, 30)
SLICES = (16, 32, 64, 128, 256, 512, 1024)
WORKERS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Engine:
    """An engine of the paper: its world, the fixed batch of its SLS, Gamma."""

    name: str
    world: World
    batch: int
    gamma_s: float


HF = Engine("transformers", World(HF_LAW, PAGED, 8, 1024, streams=False), 16, 6.0)
DS = Engine(
    "DeepSpeed", World(DS_LAW, RuleMemory(DEEPSPEED_RULES), 8, 1024, streams=False), 12, 3.0
)
ENGINES = {engine.name: engine for engine in (HF, DS)}

GAINS = ("throughput_rps", "e2e_mean_s", "e2e_p95_s", "batch_size_mean")
PAPER_GAINS = {  # percent, over SLS and over ILS
    ("transformers", "SLS"): ("+232 .. +316", "-82 .. -85", "-80 .. -81", "+100 .. +226"),
    ("DeepSpeed", "SLS"): ("+82 .. +192", "-81 .. -91", "-77 .. -89", "+43 .. +86"),
    ("DeepSpeed", "ILS"): ("+62 .. +171", "-78 .. -88", "-75 .. -86", "-"),
    ("DeepSpeed", "ILS, 33,792"): ("+62 .. +171", "-78 .. -88", "-75 .. -86", "-"),
}
INDEPENDENT_GAINS = {
    ("transformers", "SLS"): ("+285", "-84", "-81", "+173"),
    ("DeepSpeed", "SLS"): ("+180", "-89", "-86", "+59"),
}
COLUMNS = {
    "throughput_rps": "throughput, requests/s",
    "e2e_mean_s": "mean response, s",
    "e2e_p95_s": "p95 response, s",
    "batch_size_mean": "batch",
    "pad_tokens_per_request": "pad tokens",
    "invalid_tokens_per_request": "invalid tokens",
    "slices_per_request": "slices",
    "early_return_percent": "early returns, %",
    "completion_time_std_s": "CT STD, s",
}
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Case:
    """One simulation. `name` is the scheduler's, as the paper calls it."""

    engine: str
    name: str
    rate_rps: float = 20.0
    slice_tokens: int = 128
    workers: int = 8


def workload(rate_rps: float, seconds: float = 600.0, seed: int = 0) -> Trace:
    """The synthetic trace."""
    prompt = Lengths("lognormal", 400, 1.0, 1024)
    output = Lengths("lognormal", 120, 0.75, 1024)
    return generate(Arrivals(rate_rps), seconds, prompt, output, seed)


def scheduler(
    engine: Engine, name: str, slice_tokens: int = 128
) -> tuple[str, Mapping[str, Value]]:
    """The policy and the parameters of a scheduler of the paper."""
    pooled = PAPER | {"min_interval_s": engine.gamma_s, "slice_tokens": slice_tokens}
    fixed = pooled | {"interval_factor": 0.0}
    schedulers: dict[str, tuple[str, Mapping[str, Value]]] = {
        "SLS": ("sequence", {"batch_size": engine.batch}),
        "SO": ("sequence", {"batch_size": engine.batch, "slice_tokens": slice_tokens}),
        "PM": ("slice", fixed | {"max_min": False, "max_batch_size": engine.batch}),
        "AB": ("slice", fixed | {"max_min": False}),
        "LB": ("slice", fixed),
        "SCLS": ("slice", pooled),
        "SCLS, eager": ("slice", pooled | {"eager": True}),
        "ILS": ("conservative", {}),
        "ILS, 33,792": ("conservative", {}),
    }
    return schedulers[name]


def run(case: Case, seed: int = 0) -> Metrics:
    """The metrics of one case on one trace."""
    engine = ENGINES[case.engine]
    policy, parameters = scheduler(engine, case.name, case.slice_tokens)
    world = replace(engine.world, workers=case.workers)
    if case.name == "ILS, 33,792":
        world = replace(world, memory=PAGED)
    trace = workload(case.rate_rps, seed=seed)
    return simulate(trace, make_policy(policy, parameters), world).metrics({})


def run_all(cases: Sequence[Case], seeds: int, processes: int) -> dict[Case, Metrics]:
    """Each case once: means over `seeds` traces."""
    runs = over_seeds(run, [(case,) for case in dict.fromkeys(cases)], seeds, processes)
    return {
        case: {key: fmean(one[key] for one in of_seeds) for key in COLUMNS}
        for (case,), of_seeds in runs.items()
    }


ABLATION = [
    Case(engine, name) for engine in ENGINES for name in ("SLS", "SO", "PM", "AB", "LB", "SCLS")
]
BY_RATE = [
    Case(engine, name, rate)
    for engine, names in (
        ("transformers", ("SLS", "SCLS")),
        ("DeepSpeed", ("SLS", "ILS", "ILS, 33,792", "SCLS")),
    )
    for rate in RATES
    for name in names
]
SWEEP = [Case("transformers", "SCLS", slice_tokens=tokens) for tokens in SLICES]
LIGHT = [Case(engine, name, 2.0) for engine in ENGINES for name in ("SLS", "SCLS", "SCLS, eager")]
SCALE = [Case(engine, "SCLS", workers=workers) for engine in ENGINES for workers in WORKERS]
CASES = [*BY_RATE, *ABLATION, *SWEEP, *LIGHT, *SCALE]


def gain_percent(new: Metrics, old: Metrics, metric: str) -> float:
    """By how much `new` is above `old`."""
    return 100.0 * (new[metric] / old[metric] - 1.0)


def figure_11(law: LinearLaw = HF_LAW) -> tuple[float, float]:
    """Seconds of 15 requests of 10 tokens and one of 1,024 in one batch, and in two, with a slice
    of 128.
    """
    return law.serve_s(16, 1024, 128), law.serve_s(15, 10, 128) + law.serve_s(1, 1024, 128)


def metrics_table(
    cases: Sequence[Case], found: Mapping[Case, Metrics], label: str = "", field: str = ""
) -> str:
    """A row for each case: its laws, its scheduler, and its `field` under `label`."""
    body = []
    for case in cases:
        lead = [case.engine, case.name, *([f"{getattr(case, field):g}"] if field else [])]
        body.append([*lead, *(f"{found[case][key]:.4g}" for key in COLUMNS)])
    columns = ["laws", "scheduler", *([label] if field else []), *COLUMNS.values()]
    return markdown(columns, body, words=2)


def gains_table(found: Mapping[Case, Metrics]) -> str:
    """SCLS over SLS and ILS: the paper's range over its rates, the independent simulation, ours."""
    body = []
    for (engine, other), paper in PAPER_GAINS.items():
        by_rate = [
            (found[Case(engine, "SCLS", rate)], found[Case(engine, other, rate)]) for rate in RATES
        ]
        gains = [[gain_percent(new, old, metric) for new, old in by_rate] for metric in GAINS]
        at_20 = [f"{gain[RATES.index(20)]:+.0f}" for gain in gains]
        spans = [f"{min(gain):+.0f} .. {max(gain):+.0f}" for gain in gains]
        independent = INDEPENDENT_GAINS.get((engine, other))
        sources = {"paper": paper, "independent": independent, "ours, 20/s": at_20}
        for source, figures in sources.items():
            if figures:
                body.append([engine, f"{other}: {source}", *figures])
        body.append([engine, f"{other}: ours, {RATES[0]} .. {RATES[-1]}/s", *spans])
    columns = ["laws", "SCLS over", *(COLUMNS[metric].split(",")[0] for metric in GAINS)]
    return markdown(columns, body, words=2)


def report(found: Mapping[Case, Metrics], seeds: int) -> str:
    """All tables."""
    together, apart = figure_11()
    parts = [
        f"Simulated, the mean of {seeds} traces. `{COMMAND}`; its docstring has the setting.",
        f"Fig. 11: together {together:.1f} s, apart {apart:.1f} s; {CHOSEN}.",
        "What SCLS changes, in percent (section 5.2, Fig. 12 and 13):",
        gains_table(found),
        "Against the arrival rate (Fig. 12, 13, 14 and 17):",
        metrics_table(BY_RATE, found, "requests/s", "rate_rps"),
        "The ablation at 20 requests/s (Fig. 15 and 16):",
        metrics_table(ABLATION, found),
        "The slice length at 20 requests/s (Fig. 18 to 21):",
        metrics_table(SWEEP, found, "S", "slice_tokens"),
        "Light load, 2 requests/s; `eager` is ours:",
        metrics_table(LIGHT, found),
        "Workers at 20 requests/s (Fig. 22):",
        metrics_table(SCALE, found, "workers", "workers"),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(report(run_all(CASES, options.seeds, options.processes), options.seeds))


if __name__ == "__main__":
    main()
