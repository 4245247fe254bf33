"""The fit: what each law predicts beside what was measured, how large its errors are, where memory ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from toolkit.estimators.load import Laws, laws_from_fit
from toolkit.files.fit import Fit, LatencyFit
from toolkit.files.profile import Profile
from toolkit.report.material import Material
from toolkit.report.parts import Cell, Figure, Section, Table, error_cells, missing
from toolkit.report.svg import Axes, Series, chart
from toolkit.units import number, percent, seconds

KEY, TITLE = "fit", "The fit"
Point = tuple[int, int, float]  # batch size, length, seconds


def fit_section(found: Material) -> Section:
    """What `fit.json` holds, with plots where the profile that it was made from is there."""
    fit = found.fit
    if fit is None:
        command = f"llmctl profile {found.recipe.name}; llmctl fit profile.json"
        return missing(KEY, TITLE, "Nothing was measured and fitted yet.", command, found.why.get("fit", ""))
    lead = f"Laws of time and memory for {fit.engine.engine} on {fit.engine.device}, {fit.workers} workers."
    section = Section(KEY, TITLE, lead)
    if fit.engine.analytic:
        section.lines.append(f"Nothing of this was measured: {fit.engine.analytic}")
    section.tables += [_errors(fit), _candidates(fit)]
    if found.profile is None:
        why = found.why.get("profile", "there is no profile.json beside it")
        section.lines.append(f"Without its profile there are no plots of residuals: {why}.")
    else:
        section.figures += _figures(fit, found.profile)
    return section


def _errors(fit: Fit) -> Table:
    laws = [("prefill", fit.prefill), ("decode", fit.decode)]
    rows: list[tuple[Cell, ...]] = [(name, law.form, *error_cells(law.error), *_reach(law)) for name, law in laws]
    rows.append(("whole slices", _overhead(fit), *error_cells(fit.overhead.error), "", ""))
    if fit.rounds:
        overhead = fit.rounds.overhead
        text = f"{overhead.stretch:.3g} x + {overhead.batch_s:.2g} s"
        rows.append(("rounds", text, *error_cells(overhead.error), "", ""))
    if fit.steps:
        knots = f"knots {', '.join(map(str, fit.steps.knots))}"
        rows.append(("passes", knots, *error_cells(fit.steps.error), fit.steps.valid.rows_max, ""))
    columns = ["law", "form", "median error", "p95", "worst", "points", "up to batch", "up to length"]
    return Table("Errors on points that the fit did not see", columns, rows)


def _overhead(fit: Fit) -> str:
    return f"{fit.overhead.stretch:.3g} x + {fit.overhead.batch_s:.2g} s"


def _reach(law: LatencyFit) -> tuple[int, int]:
    return law.valid.batch_size_max, law.valid.length_max


def _candidates(fit: Fit) -> Table:
    rows = [
        (name, one.form, *error_cells(one.error)[:2], "kept" if one.form == law.form else "")
        for name, law in (("prefill", fit.prefill), ("decode", fit.decode))
        for one in law.candidates
    ]
    return Table("Forms that competed", ["law", "form", "median error", "p95", ""], rows)


def _figures(fit: Fit, profile: Profile) -> list[Figure]:
    laws = laws_from_fit(fit)
    prefill = [(one.batch_size, one.input_length, median(one.seconds)) for one in profile.prefill]
    decode = [(one.batch_size, one.cached_length, median(one.seconds)) for one in profile.decode]
    figures = [
        *_law_figures("prefill", prefill, lambda size, length: laws.engine.prefill_s(size, length)),
        *_law_figures("decode step", decode, lambda size, length: _step_s(fit.decode, size, length)),
        _slices(laws, profile),
        _memory(fit, laws, profile),
    ]
    return [figure for figure in figures if figure.svg]


def _step_s(law: LatencyFit, size: int, length: int) -> float:
    """tau(l, N), Eq. 4."""
    segment = [one for one in law.segments if one.batch_size_min <= size][-1]
    return segment.nl * size * length + segment.n * size + segment.l * length + segment.const


def _law_figures(name: str, points: Sequence[Point], law: Callable[[int, int], float]) -> list[Figure]:
    """Predicted over measured, and the residuals in percent over the length. In-sample: the law as it is used."""
    measured = [seconds for _, _, seconds in points]
    predicted = [law(size, length) for size, length, _ in points]
    residuals = [100 * (a / b - 1) if b else 0.0 for a, b in zip(predicted, measured, strict=True)]
    sizes = sorted({size for size, _, _ in points})
    third = -(-len(sizes) // 3) or 1
    groups = [sizes[start : start + third] for start in range(0, len(sizes), third)]
    labels = [
        f"N {size}, length {length}: predicted {seconds(law)}, measured {seconds(real)} ({percent(off)})"
        for (size, length, real), law, off in zip(points, predicted, residuals, strict=True)
    ]
    by_size = [
        Series(
            f"N {group[0]}" + (f" to {group[-1]}" if len(group) > 1 else ""),
            [length for size, length, _ in points if size in group],
            [one for (size, _, _), one in zip(points, residuals, strict=True) if size in group],
            labels=[label for (size, _, _), label in zip(points, labels, strict=True) if size in group],
        )
        for group in groups
    ]
    drawn = Series(name, measured, predicted, labels=labels)
    both = Axes("measured, s", "predicted, s", [drawn], log=True, diagonal=True)
    errors = Axes("length, tokens", "residual, %", by_size, level=0.0)
    return [
        Figure(chart(both), f"{name}: {len(points)} points, medians of their repeats; on the line they agree"),
        Figure(chart(errors), f"{name}: predicted over measured, less 1, by length and batch size N"),
    ]


def _slices(laws: Laws, profile: Profile) -> Figure:
    measured = [one.seconds for one in profile.slices]
    predicted = [
        laws.latency.prefill_s(one.batch_size, one.input_length)
        + laws.latency.decode_s(one.batch_size, one.input_length, laws.engine.iterations(one.steps))
        for one in profile.slices
    ]
    labels = [
        f"N {one.batch_size}, length {one.input_length}, {one.steps} steps: predicted {seconds(law)}, "
        f"measured {seconds(one.seconds)}"
        for one, law in zip(profile.slices, predicted, strict=True)
    ]
    drawn = Series("slices", measured, predicted, labels=labels)
    axes = Axes("measured, s", "predicted, s", [drawn], log=True, diagonal=True)
    return Figure(chart(axes), f"whole slices on all workers: {len(measured)}, overhead included")


def _memory(fit: Fit, laws: Laws, profile: Profile) -> Figure:
    """The largest batch that ran, the smallest that did not, what the law allows: of the least steps probed."""
    steps = min((one.steps for one in profile.memory), default=1)
    points = sorted((one for one in profile.memory if one.steps == steps), key=lambda one: one.input_length)
    lengths = np.array([one.input_length for one in points], dtype=np.int64)
    allowed = laws.memory.max_batch(lengths, steps, 0.0).tolist() if points else []
    failed = [(one.input_length, one.smallest_oom) for one in points if one.smallest_oom is not None]
    series = [
        Series("ran", lengths.tolist(), [one.largest_ok for one in points]),
        Series("the law allows", lengths.tolist(), allowed, "line"),
        Series("out of memory", [length for length, _ in failed], [size for _, size in failed]),
    ]
    caption = (
        f"where memory ends, in batches of {steps} more tokens; capacity {number(fit.memory.capacity_tokens)} tokens"
    )
    return Figure(chart(Axes("input length, tokens", "batch size", series, log=True)), caption)
