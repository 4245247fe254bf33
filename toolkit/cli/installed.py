"""The installed vLLM's own scheduler in place of llmctl's model of it, for `simulate` and `tune`.

It is exact for whatever the installed vLLM does, and about as slow as vLLM's scheduler is. So its
time is estimated from a simulation by the model, and what both find is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from toolkit.cli.output import note, progress
from toolkit.errors import InputError, nearest
from toolkit.units import number, seconds

if TYPE_CHECKING:
    from toolkit.backends.vllm.driver import VllmDriver
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Tuning
    from toolkit.sched.protocols import AnyPolicy
    from toolkit.sim.api import SimResult
    from toolkit.sim.world import World
    from toolkit.traces.types import Trace
    from toolkit.tuning.inputs import Inputs

MODEL: Literal["model"] = "model"
INSTALLED: Literal["installed"] = "installed"
# What vLLM's scheduler takes, on a core of 2025: to import vLLM, and for each pass, row of a pass
# and token of a prompt, which it hashes.
START_S = 14.0
PASS_S = 2e-4
ROW_S = 1.4e-5
TOKEN_S = 1e-6
CONFIRMED = 5  # settings


def refuse_other_schedulers(
    flag: str, scheduler: str | None, valid: Sequence[str], vllm_python: str | None
) -> None:
    """`InputError` for a scheduler that is not `valid`, and for a Python that nothing runs in."""
    if scheduler is not None and scheduler not in valid:
        hint = nearest(scheduler, valid)
        raise InputError(f"{flag} {scheduler}: no scheduler has that name", hint)
    if scheduler != INSTALLED and vllm_python is not None:
        raise InputError(
            f"--vllm-python {vllm_python}: nothing runs in it",
            f"add {flag} {INSTALLED}, or leave it out",
        )


def python_of(vllm_python: str | None, recipe: Recipe | None) -> str | None:
    """The Python that has vLLM: the given one, or the recipe's; None: as usual."""
    spec = recipe.engine.vllm if recipe else None
    return vllm_python or (spec.python if spec else None)


def simulate_installed(
    trace: Trace, policy: AnyPolicy, world: World, python: str | None
) -> tuple[SimResult, str]:
    """As `toolkit.sim.api.simulate`, with passes by the installed vLLM's own scheduler; and the
    version of that vLLM. Prints how long it will take, and how the model of it compares.

    `InputError` for another policy than `vllm`, `EngineError` if that Python has no vLLM.
    """
    from toolkit.sched.policies.vllm import VllmPolicy
    from toolkit.sim.api import simulate

    if not isinstance(policy, VllmPolicy):
        raise InputError(
            f"--scheduler {INSTALLED}: policy '{policy.name}' is not vLLM's own scheduler",
            f"leave it out, or simulate the policy '{VllmPolicy.name}'",
        )
    model = None
    passes = 0
    try:
        model = simulate(trace, policy, world)
    except InputError as error:
        note(f"llmctl's model of the scheduler does not know this, nor how long it takes: {error}")
    else:
        passes, work_s = _work_of(model.counters)
        text = f"about {seconds(START_S + work_s)} for about {passes:,} passes"
        note(f"{text} by the installed scheduler; the model of it is done")
    with _installed(world, python, passes) as (linked, driver):
        result = simulate(trace, policy, linked)
    which = f"passes by the scheduler of vLLM {driver.version}"
    note(*(_compared(model, result, which) if model else [which]))
    return result, driver.version


def _work_of(counts: Mapping[str, float]) -> tuple[int, float]:
    """The passes of a simulation, and about how many seconds vLLM's scheduler takes for them."""
    passes = int(counts["rounds"])
    rows = counts["batch_size_mean"] * counts["decoding_steps"]
    looked_up = counts.get("query_tokens", 0.0) + counts.get("preempted_query_tokens", 0.0)
    tokens = max(looked_up, counts.get("computed_prompt_tokens", 0.0))
    return passes, PASS_S * passes + ROW_S * rows + TOKEN_S * tokens


@contextmanager
def _installed(world: World, python: str | None, passes: int) -> Iterator[tuple[World, VllmDriver]]:
    """The world with the installed vLLM's scheduler, and the process that it is in."""
    from toolkit.backends.vllm.driver import VllmDriver

    with (
        progress("passes of the installed vLLM", passes) as advance,
        VllmDriver(python) as driver,
    ):
        driver.on_plan = advance
        yield replace(world, paged=replace(world.engine(), link=driver)), driver


def _compared(model: SimResult, installed: SimResult, which: str) -> list[str]:
    """A line on whether the model of the scheduler finds the same, and one for each of a few
    metrics that differ.
    """
    from toolkit.metrics import differences

    before = model.metrics({})
    after = installed.metrics({})
    different = differences(before, after)
    if not different:
        return [f"{which}; llmctl's model of it finds the same"]
    worst = ("rounds", "throughput_rps", "ttft_p99_s", "tpot_mean_s", "e2e_mean_s")
    named = [name for name in worst if name in different] or list(different)[:CONFIRMED]
    return [
        f"warning: {which}; llmctl's model of it finds something else in {len(different)} figures",
        *(f"  {name}: {number(after[name])}, model {number(before[name])}" for name in named),
    ]


def confirm(result: Tuning, inputs: Inputs, python: str | None) -> Tuning:
    """The tuning with its best settings simulated once more on the search windows, with passes by
    the installed vLLM's own scheduler. Prints how long that takes.

    `InputError` where no trial ran that scheduler.
    """
    from toolkit.files.tuning import Confirmation
    from toolkit.tuning.confirm import best_trials, confirmed

    trials = best_trials(result.trials, CONFIRMED)
    setup = inputs.setup("confirmed", inputs.workload.windows.search)
    passes = 0
    about_s = START_S
    for trial in trials:
        of_window, window_s = _work_of(trial.outcome.metrics)
        passes += of_window * len(setup.windows)
        about_s += window_s * len(setup.windows)
    text = f"about {seconds(about_s)} to confirm the best {len(trials)} settings"
    note(f"{text}: {passes:,} passes by the installed scheduler")
    with _installed(setup.world, python, passes) as (world, driver):
        linked = replace(setup, world=world)
        settings = [confirmed(trial, linked) for trial in trials]
    confirmation = Confirmation(vllm_version=driver.version, settings=settings)
    return result.model_copy(update={"confirmation": confirmation})
