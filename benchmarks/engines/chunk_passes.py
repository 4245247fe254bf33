"""The error of the law of whole prefills for the passes of a chunked prefill.

    python -m benchmarks.engines.chunk_passes [--repeats 7] [--json FILE]

Takes about a minute per repeat on two shared, busy cores. Needs nothing but the package: the tiny
Llama on the engine `rebatch`.

Everything runs in one process, in its CPU time on one thread (the machine may be shared). Measured
are whole prefills of N rows and L tokens, to which the law T(N, L) is fitted as `llmctl fit` does;
and prefills of N rows and 448 tokens in passes of 16 to 224 columns. Each pass is compared with
T(N, end) - T(N, start) + T(N, 0), and with T(N, end - start), which ignores the cache. Values are
medians over interleaved repeats; the table has the mean absolute error over the passes, and that of
their sum.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.estimators.fitting import fit_latency
from toolkit.estimators.forms import Points
from toolkit.estimators.laws import SegmentedLaw
from toolkit.files.fit import Segment
from toolkit.files.shipped import load_recipe

RECIPE = ROOT / "recipes" / "tiny-llama-cpu-rebatch.yaml"
SIZES = (1, 2, 4, 8)
LENGTHS = (16, 64, 128, 224, 336, 448)
COLUMNS = (16, 32, 64, 112, 224)
WIDTH = LENGTHS[-1]
Passes = tuple[int, int]  # rows, columns of a pass


def passes_s(engine: RebatchEngine, rows: int, width: int, columns: int) -> list[float]:
    """Seconds of each pass of one prefill."""
    batch = engine._padded([[7 + row] * width for row in range(rows)], width)
    taken = []
    with torch.inference_mode():
        for start in range(0, width, columns):
            began_s = time.process_time()
            engine._prefill_columns(batch, start, min(start + columns, width))
            taken.append(time.process_time() - began_s)
    return taken


def measured(
    engine: RebatchEngine, repeats: int
) -> tuple[dict[Passes, float], dict[Passes, list[float]]]:
    """Medians of whole prefills by (N, L), and of passes by (N, columns)."""
    whole: dict[Passes, list[float]] = {}
    cut: dict[Passes, list[list[float]]] = {}
    for repeat in range(repeats + 1):
        for rows in SIZES:
            for length in LENGTHS:
                (took_s,) = passes_s(engine, rows, length, length)
                whole.setdefault((rows, length), []).append(took_s)
            for columns in COLUMNS:
                cut.setdefault((rows, columns), []).append(passes_s(engine, rows, WIDTH, columns))
        if not repeat:  # the first is a warm-up
            whole = {}
            cut = {}
    medians = {
        key: [statistics.median(times) for times in zip(*runs, strict=True)]
        for key, runs in cut.items()
    }
    return {key: statistics.median(times) for key, times in whole.items()}, medians


def fitted(whole: dict[Passes, float]) -> SegmentedLaw:
    """The law of whole prefills, as `llmctl fit` makes it."""
    sizes, lengths = (np.array(column, dtype=float) for column in zip(*whole, strict=True))
    points = Points(sizes, lengths, np.array(list(whole.values())))
    fit = fit_latency("prefill", points, 0, square=True).fit
    none = Segment(batch_size_min=1, nl=0, n=0, l=0, const=0, nll=0)
    return SegmentedLaw(tuple(fit.segments), (none,), True)


def errors(law: SegmentedLaw, cut: dict[Passes, list[float]]) -> list[dict[str, float]]:
    """For each N and size of a pass: mean absolute errors in percent."""
    forms: dict[str, Callable[[int, int, int], float]] = {
        "difference": law.pass_s,
        "without_cache": lambda rows, start, end: law.prefill_s(rows, end - start),
    }
    table = []
    for (rows, columns), times in cut.items():
        line: dict[str, float] = {"rows": rows, "columns": columns}
        line |= {"passes": len(times), "sum_s": sum(times)}
        for name, form in forms.items():
            said = [form(rows, start, start + columns) for start in range(0, WIDTH, columns)]
            off = [abs(one / true - 1.0) for one, true in zip(said, times, strict=True)]
            line[f"{name}_percent"] = 100.0 * statistics.fmean(off)
            line[f"{name}_sum_percent"] = 100.0 * (sum(said) / sum(times) - 1.0)
        table.append(line)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    recipe = load_recipe(RECIPE)
    engine = RebatchEngine(recipe.model, recipe.engine, recipe.hardware)
    whole, cut = measured(engine, options.repeats)
    table = errors(fitted(whole), cut)
    heads = "T(b) - T(a) + T(0): each % | sum % | T(b - a): each % | sum %"
    print(f"| N | columns | passes | sum ms | {heads} |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for line in table:
        print(
            f"| {line['rows']} | {line['columns']} | {line['passes']} | {1000 * line['sum_s']:.1f} "
            f"| {line['difference_percent']:.1f} | {line['difference_sum_percent']:+.1f} "
            f"| {line['without_cache_percent']:.1f} | {line['without_cache_sum_percent']:+.1f} |"
        )


if __name__ == "__main__":
    main()
