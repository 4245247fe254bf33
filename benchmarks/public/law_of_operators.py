"""A law of passes made of operators: measured times of a model's parts, summed and fitted.

    pass = sum over operators of times * seconds(new tokens, or rows)
           + layers * attention(pass)

Most operators of a forward pass depend on one size: those of a layer on the pass's new tokens, the
output head and the sampler on its rows. Attention depends on what each row has cached; it was
measured at some passes, and there `pass_times` forms the sum. `law_of_passes` fits the coefficients
of `StepLaw` to such sums. No engine ran, so the law knows neither launches nor the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators.forms import Floats, percent_error, solve_relative
from toolkit.estimators.part_fits import StepForm
from toolkit.estimators.steps import StepLaw, StepShape
from toolkit.files.fit import HeldOutError

CHUNKS = 2  # a column of `features`


@dataclass(frozen=True, slots=True)
class Operator:
    """The measured times of one operator.

    Attributes:
        by: the size of a pass that its time depends on.
        times: how often a pass runs it.
        sizes: [n], ascending.
        seconds: [n] of one run at each size; linear between two.
    """

    name: str
    by: Literal["tokens", "rows"]
    times: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)):
            raise InputError(f"operator '{self.name}': its sizes are none or do not ascend")
        if len(self.seconds) != len(self.sizes):
            count = f"{len(self.sizes)} sizes and {len(self.seconds)} times"
            raise InputError(f"operator '{self.name}' has {count}; each size has one time")

    def pass_seconds(self, shapes: Sequence[StepShape]) -> Floats:
        """Seconds [n] that it takes of each pass. `InputError` beyond the measured sizes."""
        sizes = [shape.tokens if self.by == "tokens" else shape.rows for shape in shapes]
        outside = [size for size in sizes if not self.sizes[0] <= size <= self.sizes[-1]]
        if outside:
            measured = f"{self.sizes[0]:,} to {self.sizes[-1]:,} {self.by}"
            raise InputError(
                f"operator '{self.name}' was measured at {measured}; a pass has {outside[0]:,}",
                "leave such passes out of the fit",
            )
        return self.times * np.interp(sizes, self.sizes, self.seconds)


@dataclass(frozen=True, slots=True)
class Attention:
    """The measured times of attention: `seconds` [n] of one layer at the passes `shapes` [n]."""

    layers: int
    shapes: tuple[StepShape, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class OperatorLaw:
    """A law, and its errors at the sums that it was fitted to: passes without and with chunks."""

    law: StepLaw
    alone: HeldOutError
    mixed: HeldOutError


def pass_times(operators: Sequence[Operator], attention: Attention) -> Floats:
    """Seconds [n] of each pass at which attention was measured: all operators, one after another.

    `InputError` if one of the operators was not measured at such a size.
    """
    seconds = attention.layers * np.array(attention.seconds)
    for operator in operators:
        seconds = seconds + operator.pass_seconds(attention.shapes)
    return seconds


def law_of_passes(
    shapes: Sequence[StepShape],
    seconds: Floats,
    knots: tuple[int, ...] = (0,),
    *,
    beside: bool = True,
    window: int = 0,
) -> OperatorLaw:
    """The law with the least sum of squared relative residuals at passes [n] that take `seconds`
    [n]. Passes with chunks and passes without weigh the same in total.

    Tables of attention have one chunk a pass. What each chunk costs apart from its tokens then
    cannot be told from what the pass costs, and is 0.

    Args:
        beside: whether decodes beside chunks have a cost per cached token of their own.
        window: tokens of the model's sliding windows; 0: there are none.

    Raises `InputError` if passes without or with chunks are missing, or one takes no time.
    """
    mixed = np.array([shape.prefills > 0 for shape in shapes])
    if mixed.all() or not mixed.any():
        raise InputError("operators: passes with chunks and passes without are both needed")
    if seconds.min() <= 0.0:
        raise InputError(f"operators: a pass takes {seconds.min():g} s; it must be > 0")
    form = StepForm(knots, beside, window=window)
    columns = form.columns(shapes)
    if max(shape.prefills for shape in shapes) == 1:
        columns[:, CHUNKS] = 0.0
    root_weight = np.where(mixed, mixed.mean() ** -0.5, (~mixed).mean() ** -0.5)
    coefficients = solve_relative(columns, seconds, root_weight)
    expected = columns @ coefficients
    return OperatorLaw(
        form.law_of(coefficients),
        percent_error(expected[~mixed], seconds[~mixed]),
        percent_error(expected[mixed], seconds[mixed]),
    )
