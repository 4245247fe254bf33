"""The stages of `benchmarks.gpu.run`: each reads and writes files of one folder."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from benchmarks.common.command import ended
from benchmarks.gpu.live import Contender, Pace, replay_all
from toolkit.engines.protocol import (
    OutOfMemory,
    Round,
    RoundEngine,
    Row,
    SamplingParams,
    StepOutput,
)
from toolkit.errors import InputError
from toolkit.files.io import head, read_file, write_file
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.strict import Envelope, Strict
from toolkit.profiling.run import ProfileWork
from toolkit.units import MIB

# KV cache of a worker, in longest requests: SLS, which reckons with the longest, gets batches of
# about as many rows, and an overload fills it in seconds
CONTEXTS = 32
QUICK_CONTEXT = 2048  # tokens; longer outputs take longer than a quick run
QUICK_OUTPUT = 256
SHARES = (128, 16, 4)  # the longest length over the lengths of a quick grid
QUICK_SIZES = [1, 4, 16, 64]
QUICK_SEQUENCES = 5  # of rounds: as many as a fit needs
SWAP_ROWS = (1, 8)
SWAP_REPEATS = 5


class SwapPoint(Strict):
    """N rows of L cached tokens: seconds of a round that only swaps them out, and of one that only
    swaps them in.
    """

    rows: int
    length: int
    size_bytes: int
    out_s: list[float] = Field(description="the first includes pinning host memory")
    in_s: list[float]

    def gb_per_s(self) -> tuple[float, float]:
        """GB/s out and in, medians without the first round."""
        out_s, in_s = (
            statistics.median(seconds[1:] or seconds) for seconds in (self.out_s, self.in_s)
        )
        return self.size_bytes / out_s / 1e9, self.size_bytes / in_s / 1e9


class SwapFile(Envelope):
    """The file swap.json."""

    points: list[SwapPoint]


def run_stage(name: str, source: Path, folder: Path, options: Namespace) -> int:
    """Run one stage; its exit code."""
    pace = Pace(15.0, 60.0) if options.quick else Pace(60.0, 240.0)
    kind, _, engine = name.partition("-")
    stages: dict[str, Callable[[], None]] = {
        "profile": lambda: measure_profile(folder, engine),
        "fit": lambda: fit(folder, engine),
        "swap": lambda: measure_swaps(folder),
        "slices": lambda: replay_all(folder, "transformers", SLICES, pace, "slices.json"),
        "rounds": lambda: replay_all(folder, "rebatch", ROUNDS, pace, "rounds.json"),
    }

    def run() -> None:
        recipe = load_recipe(source)
        write_recipes(recipe, folder, options.device, options.device_name, quick=options.quick)
        stages[kind]()

    return ended(run)


SLICES = (
    Contender("SLS", "sequence", lambda rows: {"batch_size": rows}),
    Contender("SCLS", "slice", lambda _: {"slice_tokens": 64, "min_interval_s": 1.0}),
)
ROUNDS = (
    Contender("conservative", "conservative"),
    Contender("aggressive", "aggressive"),
    Contender("Past-Future", "past-future"),
)


def write_recipes(
    recipe: Recipe, folder: Path, device: str, device_name: str, *, quick: bool
) -> None:
    """Write the recipe for both engines. `InputError` where the folder has other ones."""
    for engine in ("transformers", "rebatch"):
        derived = derive(recipe, engine, device, device_name, quick=quick)
        path = folder / f"recipe-{engine}.json"
        if not path.is_file():
            write_file(derived, path)
        elif load_recipe(path) != derived:
            other = f"{path} is of another recipe or device, or one of the two is --quick"
            raise InputError(other, "give another --out, or remove its folder")


def derive(recipe: Recipe, engine: str, device: str, device_name: str, *, quick: bool) -> Recipe:
    """`recipe` on this device: random weights, one worker, a KV cache of `CONTEXTS` longest
    requests. With `quick`, contexts and outputs are at most `QUICK_CONTEXT` and `QUICK_OUTPUT`.
    """
    model = recipe.model
    longest = recipe.model.max_model_len
    output = max(longest // 4, 1)
    if quick:
        longest = min(longest, QUICK_CONTEXT)
        output = max(min(longest // 4, QUICK_OUTPUT), 1)
    if model.kv_bytes_per_token is None:
        raise InputError(
            f"{recipe.name}: model.kv_bytes_per_token is not set",
            "set it: it determines the size of the KV cache",
        )
    spec = recipe.profile
    if quick:
        lengths = [max(longest // share, 2) for share in SHARES]
        update = {
            "batch_sizes": QUICK_SIZES,
            "input_lengths": lengths,
            "cached_lengths": lengths,
            "repeats": 1,
        }
        update |= {
            "memory_lengths": lengths[1:2],
            "slice_tokens": [max(longest // 128, 2)],
            "slices": 8,
            "sequences": QUICK_SEQUENCES,
            "warmups": 1,
        }
        spec = spec.model_copy(update=update)
    budget_mib = CONTEXTS * longest * model.kv_bytes_per_token / MIB
    derived = recipe.model_copy(
        update={
            "name": f"{recipe.name}-{engine}"[:64]
            if not recipe.name.endswith(engine)
            else recipe.name,
            "model": model.model_copy(
                update={"max_model_len": longest}
                | ({} if model.source == "random" else {"load_format": "dummy"})
            ),
            "hardware": recipe.hardware.model_copy(update={"device": device, "name": device_name}),
            "engine": recipe.engine.model_copy(
                update={"name": engine, "kv_cache_memory_mib": budget_mib}
            ),
            "workers": 1,
            "profile": spec,
            "serve": recipe.serve.model_copy(update={"max_new_tokens": output}),
        }
    )
    return Recipe.model_validate_json(derived.model_dump_json())


def measure_profile(folder: Path, engine: str) -> None:
    from toolkit.profiling.run import journal_path, profile

    source = folder / f"recipe-{engine}.json"
    out = folder / f"profile-{engine}.json"
    write_file(profile(load_recipe(source), source, out, Printing()), out)
    journal_path(out).unlink(missing_ok=True)


class Printing:
    """A `ProfileProgress` for a log: the plan, and a line for every tenth of it."""

    def planned(self, plan: ProfileWork) -> None:
        self._steps = plan.steps
        self._done = 0
        print(f"{plan.points} points, {plan.steps} measurements", flush=True)

    def advanced(self, text: str) -> None:
        self._done += 1
        if self._done % max(self._steps // 10, 1) == 0:
            print(f"{self._done} of {self._steps}: {text}", flush=True)


def fit(folder: Path, engine: str) -> None:
    """As `llmctl fit`; that command's output needs more than a bare machine has."""
    from toolkit.estimators.fitting import fit_file, fit_profile

    source = folder / f"profile-{engine}.json"
    measured = read_file(Profile, source)
    fitted = fit_profile(measured, 0)
    result = fit_file(
        measured, fitted, head(inputs={"profile": source}, device=measured.environment.device)
    )
    for name, law in (("prefill", result.prefill), ("decode", result.decode)):
        print(f"{name}: {law.form}, held-out median error {law.error.median_percent:.1f} %")
    write_file(result, folder / f"fit-{engine}.json")


def measure_swaps(folder: Path) -> None:
    """Rounds that only swap, alone on the machine: the bandwidth to host memory and back."""
    from toolkit.engines.rebatch_engine import RebatchEngine

    source = folder / "recipe-rebatch.json"
    recipe = load_recipe(source)
    engine = RebatchEngine(recipe.model, recipe.engine, recipe.hardware)
    points = []
    for rows in SWAP_ROWS:
        for share in SHARES[1:]:
            point = _swap(engine, rows, recipe.model.max_model_len // share)
            if point is not None:
                points.append(point)
                out, back = point.gb_per_s()
                print(
                    f"{rows} x {point.length} tokens: {out:.2f} GB/s out, {back:.2f} GB/s in",
                    flush=True,
                )
    made_from = head(inputs={"recipe": source}, device=engine.facts.device)
    write_file(SwapFile(**made_from, points=points), folder / "swap.json")


def _swap(engine: RoundEngine, rows: int, length: int) -> SwapPoint | None:
    """One point; None where so many rows do not fit."""
    numbers = tuple(range(rows))
    tokens = tuple(k % engine.facts.vocab_size for k in range(length))
    enter = tuple(
        Row(str(number), tokens, 0, 2, SamplingParams(ignore_eos=True)) for number in numbers
    )
    out_s: list[float] = []
    in_s: list[float] = []
    try:
        engine.run_round(Round(steps=0, enter=enter, numbers=numbers), _go_on)
        for _ in range(SWAP_REPEATS):
            out_s.append(timed(lambda: engine.run_round(Round(steps=0, swap_out=numbers), _go_on)))
            in_s.append(timed(lambda: engine.run_round(Round(steps=0, swap_in=numbers), _go_on)))
    except OutOfMemory:
        return None
    finally:
        engine.run_round(Round(steps=0, evict=numbers), _go_on)
    size_bytes = rows * length * engine.facts.kv_bytes_per_token
    return SwapPoint(rows=rows, length=length, size_bytes=size_bytes, out_s=out_s, in_s=in_s)


def _go_on(_: StepOutput) -> bool:
    return True


def timed(work: Callable[[], object]) -> float:
    """Wall seconds until the device has finished."""
    import torch

    def settle() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    settle()
    start_s = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - start_s
