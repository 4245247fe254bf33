"""Sets the constants of an engine that no kernel tells, on a tenth of the measured servers.

    python -m benchmarks.public.calibrate --aiconfigurator DIR [--write] [--left-out FILE]

Takes an hour on two shared cores. The residuals are those of the product's own predictions
(`benchmarks.public.asking`): logarithms of predicted over measured, TPOT and TTFT. With --write the
constants replace those that ship in operators.json.

With --left-out each model's rows are left out in turn; FILE gets the constants that the others set,
by the name of the model, and `benchmarks.public.scoreboard` predicts the model's judged rows with
them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common.command import make_parser
from benchmarks.public.asking import Checkpoint, Fits, Question, checkpoint_of
from benchmarks.public.operators import family_of, flat_json
from benchmarks.public.servers import IN_MXFP4, UNEXPLAINED, Row, protocol_of, split_rows
from toolkit.estimators.gpu_operators import TABLE, EngineConstants, read_json
from toolkit.estimators.least_squares import Floats

FAMILIES = ("h100", "h200", "blackwell")
Constants = dict[str, EngineConstants]  # by family
TTFT_WEIGHT = 0.5  # of a residual: repeats of TTFT differ by several times those of TPOT
# Where the search begins. Constants that rows do not tell stay near it: one that is e times as
# large counts as much as a row that is 10 % off.
START = EngineConstants(
    kernel_s=3.4e-6,
    pass_s=1e-4,
    reduce_s=5e-6,
    sustained=0.9,
    routed=0.9,
    routed_mxfp4=0.9,
    speed_mxfp4=1.0,
    reduce_speed=1.0,
    launch_s=1.5e-4,
    host_s=5e-4,
    host_row_s=4e-5,
    front_s=0.015,
    front_row_s=1e-4,
)
MXFP4 = ("routed_mxfp4", "speed_mxfp4")  # constants of kernels for experts in mxfp4
HOST = ("host_s", "host_row_s")  # only H100s ran engines that do not plan ahead
ROW_OFF = 0.1
MOST_STEPS = 15
SETTLED = 1e-3  # the search ends where a step changes the sum of squares, or the constants, by less
PROCESSES = 2


def shipped_constants() -> Constants:
    """Return the constants that ship."""
    shipped = read_json(TABLE)["engine"]["constants"]
    return {name: EngineConstants(**shipped[name]) for name in FAMILIES}


_QUESTIONS: list[Question] = []  # of a process of the pool
_FITS: Fits = {}  # by one set of constants


def _ask_about(asked: Sequence[tuple[Row, Checkpoint]]) -> None:
    _QUESTIONS[:] = [Question(*one) for one in asked]


def _logs_off(place: int, constants: EngineConstants) -> tuple[float, float]:
    """Return the logarithms of predicted over measured TPOT and TTFT of one question."""
    question = _QUESTIONS[place]
    if any(known != constants for _, known in _FITS):
        _FITS.clear()
    found = question.predict(_FITS, constants)
    row = question.row
    return float(np.log(found.tpot_s / row.tpot_s)), float(np.log(found.ttft_s / row.ttft_s))


def fit_constants(
    data: Path,
    rows: Iterable[Row],
    start: EngineConstants,
    names: Sequence[str],
    first: EngineConstants | None = None,
) -> EngineConstants:
    """Return the constants `names` with the least residuals, others as at the `start`.

    Each model on each GPU weighs alike; a residual beyond 10 % counts less than its square. TTFT
    counts where the source says its protocol.

    Args:
        start: what constants that rows do not tell stay near.
        first: where the search begins; None: at the start.
    """
    rows = [row for row in rows if row.model not in UNEXPLAINED]
    if not rows:
        return start
    groups = Counter((row.gpu, row.model) for row in rows)
    weight = np.array([groups[row.gpu, row.model] ** -0.5 for row in rows])
    usual = float(np.median(weight))
    said = np.array([TTFT_WEIGHT * protocol_of(row).said for row in rows])
    middle = np.array([getattr(start, name) for name in names])
    begin = np.array([getattr(first or start, name) for name in names])

    def constants_at(logs: Floats) -> EngineConstants:
        values = [float(f"{value:.4g}") for value in np.exp(logs) * middle]
        return replace(start, **dict(zip(names, values, strict=True)))

    asked = [(row, checkpoint_of(data, row)) for row in rows]
    with ProcessPoolExecutor(PROCESSES, initializer=_ask_about, initargs=(asked,)) as pool:

        def residual(shifted: Floats) -> Floats:
            logs = shifted - 1.0
            constants = [constants_at(logs)] * len(rows)
            found = np.array(list(pool.map(_logs_off, range(len(rows)), constants)))
            print(".", end="", file=sys.stderr, flush=True)
            return np.concatenate(
                [weight * found[:, 0], weight * said * found[:, 1], ROW_OFF * usual * logs]
            )

        found = least_squares(
            residual,
            1.0 + np.log(begin / middle),  # of 0 no step is a share
            loss="soft_l1",
            f_scale=ROW_OFF * usual,
            diff_step=0.05,
            ftol=SETTLED,
            xtol=SETTLED,
            max_nfev=MOST_STEPS,
        )
    print(file=sys.stderr)
    return constants_at(found.x - 1.0)


def calibrate(
    data: Path, rows: Sequence[Row], first: Constants | None = None, without: str = ""
) -> Constants:
    """Return the constants of each family. Models in mxfp4 set the constants of their own kernels,
    and no other.

    Args:
        first: where the search begins; None: at `START`.
        without: a model that is left out; families without one keep the `first` constants.
    """
    names = [each.name for each in fields(EngineConstants) if each.name not in MXFP4]
    found: Constants = {}
    start = START
    for family in FAMILIES:
        own = [row for row in rows if family_of(row.gpu) == family]
        known = first[family] if first else None
        kinds = {kind: [row for row in own if (row.model in IN_MXFP4) == kind] for kind in (0, 1)}
        constants = known or START
        if not known or any(row.model == without for row in kinds[0]):
            others = [row for row in kinds[0] if row.model != without]
            constants = fit_constants(data, others, start, names, known)
        if not found:  # the other families have the host of the first
            start = replace(START, **{name: getattr(constants, name) for name in HOST})
            names = [name for name in names if name not in HOST]
        begin = replace(constants, **{name: getattr(START, name) for name in MXFP4})
        in_mxfp4 = [row for row in kinds[1] if row.model != without]
        found[family] = fit_constants(data, in_mxfp4, begin, MXFP4, known)
    return found


def left_out(data: Path, rows: Sequence[Row]) -> dict[str, Constants]:
    """Return the constants that the rows of all other models set, by the model that is left out."""
    models = sorted({row.model for row in rows} - set(UNEXPLAINED))
    return {model: calibrate(data, rows, shipped_constants(), model) for model in models}


def write_constants(constants: Constants, rows: int) -> None:
    """Replace the constants that ship, which `rows` servers set."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    content["engine"] = {
        "constants": {name: asdict(one) for name, one in constants.items()},
        "source": f"{rows} rows of systems/silicon_sample.csv, vLLM 0.10 to 0.19",
    }
    TABLE.write_text(flat_json(content), encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--aiconfigurator", type=Path, required=True, metavar="DIR")
    parser.add_argument("--write", action="store_true", help="replace the constants that ship")
    parser.add_argument("--left-out", type=Path, metavar="FILE", help="instead: without each model")
    options = parser.parse_args()
    tenth = split_rows(options.aiconfigurator).tenth
    if options.left_out:
        found = left_out(options.aiconfigurator, tenth)
        content = {
            model: {name: asdict(one) for name, one in constants.items()}
            for model, constants in found.items()
        }
        options.left_out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return
    constants = calibrate(options.aiconfigurator, tenth)
    print(json.dumps({name: asdict(one) for name, one in constants.items()}))
    if options.write:
        write_constants(constants, len(tenth))


if __name__ == "__main__":
    main()
