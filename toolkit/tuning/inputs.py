"""What a tuning starts from, read and checked, and the settings of its search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Settings
from toolkit.routing.routers import router_of
from toolkit.sched.policies import BUILT_IN, refusal
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import FLAGS, VllmPolicy
from toolkit.sim.api import usual_policies
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.windows import TraceWindow
from toolkit.tuning.evaluate import Task
from toolkit.tuning.search import SearchSettings
from toolkit.tuning.spaces import make_spaces, over_drafts, router_spaces
from toolkit.tuning.workload import CutTrace, whole_task


@dataclass(slots=True, frozen=True)
class TuneInputs:
    """What a tuning starts from, read and checked."""

    recipe: Recipe
    fit: Fit
    cut: CutTrace

    @property
    def search_settings(self) -> SearchSettings:
        """See `search_settings`."""
        return search_settings(self.recipe, self.fit)

    @property
    def deployment(self) -> Deployment:
        """The recipe's own settings."""
        return Deployment.of(self.recipe, self.fit)

    def on_windows(self, label: str, windows: Sequence[TraceWindow]) -> Task:
        """The recipe's own settings on `windows`."""
        at_once = self.recipe.tune.concurrency or 0
        workloads = [Workload(window.trace, at_once) for window in windows]
        return Task(self.deployment, workloads, self._label(label))

    def whole(self, settings: Settings) -> Task:
        """Where settings are judged: on the whole trace."""
        deployment = replace(self.deployment, settings=settings)
        return whole_task(deployment, self.cut.trace, self._label("whole trace"))

    def _label(self, label: str) -> str:
        return f"{label}, {self.recipe.workers} workers"


def ranges_of_release(fit: Fit) -> dict[str, list[Value]]:
    """The ranges of flags that not every release of vLLM has, if the measured one has them."""
    if fit.engine.engine != VllmPolicy.engine:
        return {}
    return {
        f"{VllmPolicy.name}.{name}": list(flag.search)
        for name, flag in FLAGS.items()
        if flag.search and flag.is_in(fit.engine.engine_version)
    }


def search_settings(recipe: Recipe, fit: Fit) -> SearchSettings:
    """The recipe's settings of the search.

    "All" policies are those that the laws of `fit` can simulate. Raises `InputError` for wrong
    settings.
    """
    spec = recipe.tune
    workers = recipe.workers
    ranges = {**ranges_of_release(fit), **spec.space}
    spaces = make_spaces(recipe.policy, spec.policies, ranges, workers, usual_policies(fit))
    if fit.steps is not None:
        numbers = [steps.draft_tokens for steps in (fit.steps, *fit.drafts)]
        spaces = [over_drafts(space, numbers) for space in spaces]
    if router_of(recipe) is not None:
        if spaces[0].policy not in BUILT_IN:  # each replica has a scheduler of its own
            raise InputError(
                f"policy '{spaces[0].policy}' on {workers} replicas: only the policies of a "
                f"server's own scheduler ({', '.join(BUILT_IN)}) are simulated behind a router",
                "set policy.name to one of them, or workers to 1",
            )
        spaces = router_spaces(spaces[0], recipe)
    engine = recipe.engine.name
    served = frozenset(space.key for space in spaces if refusal(space.policy, engine) is None)
    # Policies that the engine can serve come first, in case there are few trials.
    own, *rest = spaces
    rest.sort(key=lambda space: space.key not in served)
    return SearchSettings([own, *rest], spec.trials, spec.seed, served)
