"""The recommended settings of shipped recipes keep their targets on their own trace, by the shipped
fit, at half of the capacity of the recipe's settings. One recipe of each engine and law stands for
its siblings.
"""

import pytest
import samples
from lean import verdict_only

from toolkit.cli.arguments import open_recipe
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file, shipped_siblings
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Tuning
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import make_workload

pytestmark = pytest.mark.slow

NAMES = (
    "llama-3.1-8b-h200",
    "llama-3.1-8b-h200-measured",
    "qwen3-8b-a100-80gb-rebatch",
    "llama-2-13b-a100-80gb-transformers",
    "tiny-llama-cpu",
)
QUICKLY = {"trials": 4, "draws": 0, "policies": ["own"], "window_s": None}


def tuned(name: str, *, beside: bool = False, **changes: object) -> Tuning:
    """The shipped recipe, tuned by its shipped fit on its own trace, with a few trials. `beside`:
    the recipes for other engines are tried, too.
    """
    recipe = open_recipe(recipe_path(name))
    recipe = recipe.model_copy(update={"tune": recipe.tune.model_copy(update=QUICKLY | changes)})
    fit = read_file(Fit, fit_path(name))
    workload = make_workload(recipe, fit, read_trace(trace_path(recipe.tune.trace))[0])
    siblings = tuple(shipped_siblings(recipe)) if beside else ()
    inputs = Inputs(recipe, fit, workload, siblings=siblings)
    return tune(inputs, InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_s_settings_keep_its_targets(name: str) -> None:
    with verdict_only():
        result = tuned(name, load=0.5)
    assert result.keeps_limits
    assert result.keeps_up
    assert result.alternatives is not None
    assert result.alternatives.feasible
    for key, limit in result.sla.items():
        assert result.recommended.metrics[key] <= limit
    assert result.recommended.metrics["sla_attainment_percent"] >= 100.0 - len(result.sla)
    assert all(one.refusal is None for one in result.policies)


def test_overloaded_static_batches_point_to_vllm() -> None:
    result = tuned("llama-3.1-8b-h200-transformers", beside=True, request_rate_rps=8.0)
    found = result.alternatives
    assert found is not None
    assert not found.feasible
    kept = {one.recipe: one for one in found.siblings if one.feasible}
    assert kept["llama-3.1-8b-h200"].workers == 1
    assert kept["llama-3.1-8b-h200"].outcome.policy == "vllm"
    assert (kept["llama-3.1-8b-h200"].up_to_rps or 0.0) > 16.0
    assert found.workers is None  # no more GPUs, where one suffices
    assert result.capacity is not None
    assert result.capacity.recommended_rps is not None
    assert result.capacity.recommended_rps < 8.0
