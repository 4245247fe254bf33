"""Tensor parallelism beside replicas: the same GPUs as a few large workers, or as many small ones.

Laws are computed for each size of a worker. Those that were measured with one size do not tell
another's, so of a measured fit only its own size is searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import ParallelSize, Tuning

SIZES = (1, 2, 4, 8)  # GPUs of a worker that are tried where none are named
ONE_SIZE = "laws for another tensor parallelism do not follow from laws that were measured"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """GPUs in workers: a recipe with their number and size, and the fit that holds for it."""

    recipe: Recipe
    fit: Fit

    @property
    def size(self) -> int:
        """GPUs of a worker."""
        return self.recipe.engine.tensor_parallel_size


def on_gpus(recipe: Recipe, size: int, gpus: int) -> Recipe:
    """The recipe with `gpus` GPUs in workers of `size` GPUs each.

    A worker's price changes with its GPUs. Raises `InputError` where the size does not divide the
    GPUs, or the model cannot be divided among so many.
    """
    if gpus % size:
        raise InputError(
            f"tensor parallelism {size}: it does not divide {gpus} GPUs", "change one of both"
        )
    usd = recipe.hardware.usd_per_hour
    given = recipe.model_dump(exclude_unset=True)
    given["workers"] = gpus // size
    given["engine"] = {**given.get("engine", {}), "tensor_parallel_size": size}
    if usd is not None:
        given["hardware"]["usd_per_hour"] = usd * size / recipe.engine.tensor_parallel_size
    try:
        return Recipe.model_validate(given)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise InputError(problem, "choose another tensor parallelism") from None


def _rank(tuning: Tuning) -> tuple[bool, int, float, float, float]:
    """A greater rank is better: all limits kept; of machines that a search sized, the fewest GPUs;
    then the highest rate at which known settings keep the limits, the goodput, the latency.
    """
    metrics = tuning.recommended.metrics
    gpus = tuning.workers * tuning.tensor_parallel_size if tuning.sizing else 0
    most_rps = tuning.capacity and tuning.capacity.most_rps
    latency_s = metrics.get("e2e_mean_s", 0.0)
    return tuning.keeps_limits, -gpus, most_rps or 0.0, metrics["goodput_rps"], -latency_s


def compared(
    machines: Sequence[Arrangement], tunings: Sequence[Tuning], refused: Mapping[int, str]
) -> Tuning:
    """The best of the tunings, with a row for each machine, and for each size that was not tried,
    with the reason.
    """
    rows = [_row(machine, tuning) for machine, tuning in zip(machines, tunings, strict=True)]
    rows += [ParallelSize(tensor_parallel_size=size, refused=why) for size, why in refused.items()]
    rows.sort(key=lambda row: row.tensor_parallel_size)
    return max(tunings, key=_rank).model_copy(update={"parallel": rows})


def _row(machine: Arrangement, tuning: Tuning) -> ParallelSize:
    usd = machine.recipe.hardware.usd_per_hour
    return ParallelSize(
        tensor_parallel_size=machine.size,
        workers=tuning.workers,
        outcome=tuning.recommended,
        keeps_limits=tuning.keeps_limits,
        capacity_rps=tuning.capacity and tuning.capacity.most_rps,
        usd_per_hour=usd and usd * tuning.workers,
    )
