"""Tables that the page and the terminal both show. A cell None: the value is not known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.catalogue.classes import of_resolved
from toolkit.engine_traits import traits_of
from toolkit.files.bench import BenchReport, took_text
from toolkit.files.fit import Fit, OverheadFit
from toolkit.files.plan import PREDICTED, Plan
from toolkit.files.tuning import UNSERVED, ParameterValue, Settings, Tuning
from toolkit.laws.passes import HeldOutError
from toolkit.report.parts import Cell, Sheet, Table
from toolkit.units import bracketed, counted, number, percent, seconds, word

# of a plan's predicted metrics, those that are shown; the plan has all
HEADLINES = {"goodput_rps", "throughput_rps", "ttft_p99_s", "tpot_mean_s", "e2e_p95_s"}


def error_cells(error: HeldOutError) -> list[str]:
    """Return the median, the 95th percentile and the worst error, in percent."""
    shares = (error.median_percent, error.p95_percent, error.worst_percent)
    return [f"{share:.1f} %" for share in shares]


# What is printed for the terms of the parts of rounds.
PART_TERMS = {"pass": "", "row": " N", "token": " N*L", "cached": " N*L"}


def fit_table(fit: Fit) -> Table:
    """Return the laws of a fit, with their errors on points that it did not see."""
    rows: list[list[Cell]] = []
    for name, law in (("prefill", fit.prefill), ("decode", fit.decode)):
        reach = f"N {law.valid.rows_max}, L {law.valid.length_max}"
        rows.append([name, law.law.form, *error_cells(law.error), reach])
    rows.append(_overhead("slice", fit.overhead, fit.workers))
    rows += _other_laws(fit)
    points = "computed points" if fit.engine.analytic else "points"
    title = f"{fit.recipe_name}: absolute error on held-out {points}"
    return Table(title, ["law", "form", ">median", ">p95", ">worst", "measured up to"], rows)


def agreement_notes(fit: Fit) -> list[str]:
    """Return how far the simulator agrees with vLLM's own scheduler: of the version that was
    measured, or where none was, of the last one that was compared; nothing for other engines.
    """
    if not traits_of(fit.engine.engine).timed_by_pass:
        return []
    from toolkit.backends.vllm.conformance.results import agreement, last_compared

    resolved = fit.steps.resolved if fit.steps else None
    classes = {one.name for one in of_resolved(resolved)} if resolved else set()
    version = fit.engine.engine_version or last_compared()
    return [agreement(version, classes)] if version else []


def _overhead(name: str, fit: OverheadFit, workers: int) -> list[Cell]:
    """The line of what serving adds to the laws of an engine."""
    form = f"{seconds(fit.batch_s)} + {number(fit.stretch)} x laws"
    return [name, form, *error_cells(fit.error), f"{counted(workers, 'worker')} busy"]


def _other_laws(fit: Fit) -> list[list[Cell]]:
    """The lines of rounds, swaps, and the passes of a paged engine."""
    lines: list[list[Cell]] = []
    rounds = fit.rounds
    swap = fit.swap
    steps = fit.steps
    if rounds:
        lines.append(_overhead("round", rounds.overhead, fit.workers))
        parts = {"join": rounds.join, "leave": rounds.leave, "grow": rounds.grow}
        for name, part in parts.items():
            named = ((value, PART_TERMS[term]) for term, value in part.terms.items())
            terms = " + ".join(f"{number(value * 1e6)}{name}" for value, name in named if value)
            form = f"{terms} us" if terms else "takes no time"
            assert part.error is not None
            lines.append([name, form, *error_cells(part.error), f"{part.error.points} points"])
    if swap and swap.error:
        out, back = (f"{rate / 1e9:.2g}" for rate in (swap.out_bytes_per_s, swap.in_bytes_per_s))
        form = f"{seconds(swap.latency_s)} + {out}, {back} GB/s"
        lines.append(["swap", form, *error_cells(swap.error), f"{swap.error.points} points"])
    if steps:
        form = steps.law.form
        if steps.launches:
            form = f"overlapping, launches {steps.launches}"
        reach = f"{steps.valid.tokens_max:,} new tokens" if steps.law.valid else ""
        lines.append(["pass", form, *error_cells(steps.error), reach])
    return lines


def plan_sheet(plan: Plan) -> Sheet:
    """Return each value of a plan with its reason; of the predicted metrics, the headlines."""
    rows: list[list[Cell]] = [
        [key, item.value, item.source]
        for key, item in plan.explained.items()
        if not key.startswith(PREDICTED) or key.removeprefix(PREDICTED) in HEADLINES
    ]
    title = f"{plan.recipe.name}: {plan.recipe.description}".rstrip(": ")
    return Sheet("plan", "", tables=[Table(title, ["what", "<planned", "because"], rows)])


def bench_tables(replayed: BenchReport, caption: str) -> list[Table]:
    """Return what was measured beside what was predicted, at the speed of the warm-up and as
    fitted, with the errors; then the targets, if there are any.
    """
    predicted = bool(replayed.predicted.metrics)
    warm = predicted and replayed.warmup is not None
    columns = ["metric", ">measured", ">predicted", ">its error", ">as fitted", ">its error"]
    rows: list[list[Cell]] = []
    for one in replayed.compared:
        rows.append([one.metric, one.measured, one.predicted, _error(one.error_percent)])
        rows[-1] += [one.as_fitted, _error(one.as_fitted_error_percent)]
    found = [Table(caption, columns[: 2 + 2 * predicted + 2 * warm], rows)]
    if not replayed.measured.used:
        return found
    both = (replayed.measured, replayed.predicted)
    shares = [one.metrics.get("sla_attainment_percent") for one in both]
    attained = [None if share is None else f"{share:.1f} %" for share in shares]
    rows = []
    for name, limit_s in replayed.sla.items():
        rows.append([name, limit_s])
        for share in (one.used.get(name) for one in both):
            kept = None if share is None else "yes" if share <= 1.0 else "NO"
            rows[-1] += [None if share is None else share * limit_s, kept]
    rows.append(["requests within all", None, attained[0], None, attained[1], None])
    columns = ["target", ">limit", ">measured", "kept", ">predicted", "kept"]
    return [*found, Table("", columns[: 4 + 2 * predicted], rows)]


def bench_notes(result: BenchReport) -> list[str]:
    """Return what a reader must know before trusting the figures of a bench, a line each."""
    lines = []
    if result.warmup and result.replay_slowdown:
        before = f"{result.warmup.slowdown:.2f}"
        lines.append(
            f"during the replay {took_text(result.replay_slowdown)}; in the warm-up {before}"
        )
    if result.cache is not None:
        lines.append(result.cache.text())
    if result.interrupted:
        answered = f"{result.answered:,} of {result.requests:,} requests were answered"
        lines.append(f"interrupted: {answered}, and are reported")
    lines += [f"{count:,} requests failed: {reason}" for reason, count in result.failures.items()]
    if result.refused:
        missed = ": attainment and goodput count them as missed" if result.sla else ""
        prediction = "; the prediction serves every request" if result.predicted.metrics else ""
        refused = f"{result.refused:,} of {result.requests:,} requests were refused for load"
        lines.append(f"{refused}{missed}{prediction}")
    if result.wrong_length:
        lines.append(f"{result.wrong_length:,} outputs had another length than in the trace")
    if result.client:
        lines.append(result.client.text())
    return lines


def _error(error_percent: float | None) -> str | None:
    return None if error_percent is None else percent(error_percent)


def tuning_tables(result: Tuning, metrics: Iterable[str]) -> list[Table]:
    """Return each policy's best settings, the best settings of all, these `metrics`, the limits,
    and how much each parameter matters.
    """
    before = result.defaults.settings
    after = result.best.settings
    same = before.key == after.key
    first = settings_of(before)
    settings: list[list[Cell]] = []
    for name, value in settings_of(after).items():
        own = word(first[name]) if name in first else None
        settings.append([name, *([own] if same else []), word(value)])
    heads = ["default", "best"]
    if not same:
        heads = [f"{_short(before)}, default", f"{_short(after)}, best"]
    about = f"predicted on {result.judged.requests:,} requests of the trace"
    limits = [[one.name, one.allowed(), one.prediction(), one.kept] for one in result.limits]
    swings: list[list[Cell]] = []
    for swept in result.sensitivity:
        over = f"{word(swept.values[0])} .. {word(swept.values[-1])}"
        swings.append([swept.parameter, f"{swept.swing_percent:.1f} %", over])
    return [
        *([_policies(result)] if len(result.policies) > 1 else []),
        Table(
            f"policy '{after.policy}', {len(result.trials)} trials at {result.load} on "
            f"{counted(result.workers, 'worker')}",
            ["parameter", *(["default"] if same else []), "best"],
            settings,
        ),
        Table(
            f"{about}{bracketed(result.changes)}",
            ["metric", *(f">{name}" for name in heads), ">change"],
            _changes(result, metrics),
        ),
        Table(
            f"{which_settings(result)} beside the limits",
            ["limit", ">allowed", ">predicted", "kept"],
            limits,
        ),
        Table(
            "how far goodput moves with one parameter",
            ["parameter", ">goodput swing", "over"],
            swings,
        ),
    ]


def which_settings(result: Tuning) -> str:
    """Return which settings a tuning recommends."""
    return "the recipe's settings" if result.keep_defaults else "the best settings"


def _policies(result: Tuning) -> Table:
    """Return the best settings of each policy or router on the whole trace: its trials, its
    goodput, the latency of the search, and whether it keeps all limits. The best is the first.
    """
    from toolkit.sched.policies import footnote, marked

    def rank(row: Sequence[Cell]) -> tuple[bool, float]:
        return not row[4], -float(str(row[2]))

    rows: list[list[Cell]] = []
    for one in result.policies:
        settings = one.best.settings
        router = settings.replica_router
        metrics = one.best.metrics
        name = router.name if router else marked(settings.policy, result.engine)
        goodput_rps = metrics.get("goodput_rps", 0.0)
        latency_s = metrics.get(result.latency_metric, 0.0)
        rows.append([name, one.trials, goodput_rps, latency_s, one.best.outcome.kept])
    what = "router" if result.best.settings.replica_router else "policy"
    return Table(
        f"each {what}'s best settings, on the whole trace",
        [what, ">trials", ">goodput_rps", f">{result.latency_metric}", "in limits"],
        sorted(rows, key=rank),
        remark=footnote([one.best.settings.policy for one in result.policies], result.engine),
    )


def _changes(result: Tuning, metrics: Iterable[str]) -> list[list[Cell]]:
    """Return these metrics on the whole trace: of the defaults, of the best, and the change."""
    before = result.defaults.metrics
    after = result.best.metrics
    rows: list[list[Cell]] = []
    for name in metrics:
        if name in before and name in after:
            old = before[name]
            new = after[name]
            rows.append([name, old, new, percent(100 * (new / old - 1)) if old else None])
    return rows


def _short(settings: Settings) -> str:
    """What the search compares: the router, or else the policy."""
    return settings.replica_router.name if settings.replica_router else settings.policy


def share_used(share: float) -> str:
    """The used share of a limit in words: 'at 95% of its limit'."""
    if share >= UNSERVED:
        return "broken, since no request is served"
    return f"at {share:.0%} of its limit"


def settings_of(settings: Settings) -> dict[str, ParameterValue]:
    """The policy's parameters, then the router and its parameters."""
    router = settings.replica_router
    if router is None:
        return settings.parameters
    own = {f"{router.name}.{name}": value for name, value in router.parameters.items()}
    return {**settings.parameters, "replica_router": router.name, **own}
