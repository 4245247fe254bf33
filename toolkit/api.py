"""The Python API: the simulator as a library. docs/reference/python.md documents it.

Names that are exported here keep their meaning within a minor version; other modules may change.
Everything is deterministic: the same experiment gives the same result.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import find_recipe, fit_path, read_file
from toolkit.metrics import Floats, latencies
from toolkit.sched.memory import Footprint
from toolkit.sched.policies.continuous import ContinuousPolicy
from toolkit.sched.policies.parameters import Value, choice, parameter, policy
from toolkit.sched.protocols import AnyPolicy
from toolkit.sched.types import Job, Worker
from toolkit.sched.view import Decision, View
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.world import UNIT_STEP, World, make_world, policy_for
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import fit_lengths, prepare, scale_rate

__all__ = [
    "ContinuousPolicy",
    "Decision",
    "Experiment",
    "Footprint",
    "Job",
    "SimResult",
    "Trace",
    "View",
    "Worker",
    "choice",
    "latencies_of",
    "open_experiment",
    "parameter",
    "policy",
]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A trace and a simulated server without a policy. `run` may be called any number of times."""

    trace: Trace
    world: World
    fit: Fit | None

    def run(self, policy: str | AnyPolicy, **parameters: Value) -> SimResult:
        """Serve the trace under a policy, given by name with its parameters, or as an object.

        `InputError` for an unknown name or parameter; `SimulationStalledError` if the policy starts
        nothing more while requests wait.
        """
        if not isinstance(policy, str):
            if parameters:
                raise InputError(
                    "a policy object has its parameters already", "give them to its constructor"
                )
            return simulate(self.trace, policy, self.world)
        return simulate(self.trace, policy_for(self.fit, policy, parameters), self.world)


def open_experiment(
    trace: str | os.PathLike[str],
    fit: str | os.PathLike[str],
    *,
    rate_rps: float | None = None,
    workers: int = 0,
    max_new_tokens: int = 0,
    seed: int = 0,
    **settings: Value,
) -> Experiment:
    """Read a trace and a fit, each a file or the name of one that ships.

    `fit` may be "unit-step", a clock that counts decode steps. `rate_rps`: scale arrivals to this
    mean rate. `workers`, `max_new_tokens`: 0: the fit's and its recipe's. Requests are fitted to
    the recipe's limits, like in `llmctl tune`; `trace.changes` says how. `settings` of the
    simulated world, such as `capacity_tokens`. `InputError` for a file that cannot be used.
    """
    requests, _ = read_trace(trace_path(os.fspath(trace)))
    fitted: Fit | None = None
    if os.fspath(fit) != UNIT_STEP:
        path = fit_path(fit)
        fitted = read_file(Fit, path)
        recipe = find_recipe(fitted, path)
        if recipe is not None:
            max_new_tokens = max_new_tokens or recipe.serve.max_new_tokens
            requests = prepare(requests, recipe, max_new_tokens=max_new_tokens)
        elif max_new_tokens:
            engine = fitted.engine
            requests = fit_lengths(requests, engine.engine, engine.max_model_len, max_new_tokens)
        else:
            raise InputError(
                f"{path}: its recipe, which limits the outputs, is not found",
                "give max_new_tokens, the most tokens that a request may ask for",
            )
    if rate_rps is not None:
        requests = scale_rate(requests, rate_rps)
    world = make_world(fitted, settings, workers=workers, max_new_tokens=max_new_tokens, seed=seed)
    return Experiment(requests, world, fitted)


def latencies_of(result: SimResult) -> dict[str, Floats]:
    """`ttft`, `tpot`, `mtpot` and `e2e` of each request that ended well, in seconds; `tpot` and
    `mtpot` only of requests with several tokens.
    """
    return latencies(result.served)
