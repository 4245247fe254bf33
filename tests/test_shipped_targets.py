"""The recommended settings of shipped recipes keep their targets on their own trace, by the shipped
fit, at half of the capacity of the recipe's settings. One recipe of each engine and law stands for
the others.
"""

import pytest
import samples
from lean import verdict_only

from toolkit.cli.arguments import open_recipe
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import BEHIND, Tuning
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

pytestmark = pytest.mark.slow

NAMES = (
    "llama-3.1-8b-h200",
    "llama-3.1-8b-h200-measured",
    "llama-3.1-8b-a100-80gb",
    "tiny-llama-cpu",
)
QUICKLY = {"trials": 4, "policies": ["own"], "window_s": None}


def tuned(name: str, **changes: object) -> Tuning:
    """The shipped recipe, tuned by its shipped fit on its own trace, with a few trials."""
    recipe = open_recipe(recipe_path(name))
    recipe = recipe.model_copy(update={"tune": recipe.tune.model_copy(update=QUICKLY | changes)})
    fit = read_file(Fit, fit_path(name))
    workload = cut_trace(recipe, fit, read_trace(trace_path(recipe.tune.trace))[0])
    return tune(
        TuneInputs(recipe, fit, workload), InProcessRunner(), samples.HEAD, lambda best: None
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_recipe_s_settings_keep_its_targets(name: str) -> None:
    with verdict_only():
        result = tuned(name, load=0.5)
    assert result.keeps_limits
    assert result.recommended.outcome.used[BEHIND] <= 1.0
    for key, limit in result.sla.items():
        assert result.recommended.metrics[key] <= limit
    assert result.recommended.metrics["sla_attainment_percent"] >= 100.0 - len(result.sla)
    assert all(one.refusal is None for one in result.policies)
