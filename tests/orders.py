"""Orders for rendering: a plan on CPUs, and one on GPUs with a model of the hub. The numbers are
made up for tests.
"""

from pathlib import Path
from typing import Any, TypeVar

import samples
from pydantic import BaseModel

from toolkit.deploy.order import Options, Order
from toolkit.deploy.plan import make_plan
from toolkit.files.fit import Fit
from toolkit.files.io import file_text, write_file
from toolkit.files.plan import Plan, PlannedWorkload
from toolkit.files.tuning import Outcome, Settings

ModelT = TypeVar("ModelT", bound=BaseModel)
SLICE = Settings(policy="slice", parameters={"slice_tokens": 64})
GPU = {
    "model": {
        "source": "org/model",
        "max_model_len": 512,
        "weight_bytes": 16 << 30,
        "revision": "abc123",
    },
    "hardware": {"device": "cuda", "name": "H200", "memory_gib": 139.8},
    "engine": {"name": "transformers", "gpu_memory_utilization": 0.85},
    "sla": {"ttft_p99_s": 2.0, "mtpot_p99_s": 0.5, "e2e_p99_s": 90.0},
}

VLLM = GPU | {"engine": {"name": "vllm", "gpu_memory_utilization": 0.85}}
INSIDE = Settings(policy="past-future", parameters={})  # runs inside vLLM


def of_target(target: str, folder: Path) -> Plan:
    """A plan that this target takes: a script for vLLM has settings of vLLM."""
    return plan(folder, INSIDE, **VLLM) if target == "vllm" else plan(folder, **GPU)


def plan(folder: Path, policy: Settings = SLICE, fit: Fit | None = None, **changes: object) -> Plan:
    """A plan of the samples' recipe with these changes, tuned as far as it can be said without
    tuning.
    """
    recipe = samples.recipe(**changes)
    fit = changed(
        fit or samples.fit(),
        engine__engine=recipe.engine.name,
        engine__dtype=recipe.model.dtype,
        engine__tensor_parallel_size=recipe.engine.tensor_parallel_size,
    )
    paths = {"recipe": folder / "recipe.json", "fit": folder / "fit.json"}
    write_file(recipe, paths["recipe"])
    write_file(fit, paths["fit"])
    workload = PlannedWorkload(trace="chat-small.jsonl", request_rate_rps=3.5)
    predicted = {"goodput_rps": 3.25, "throughput_rps": 3.5, "e2e_p99_s": 41.5}
    made = make_plan(recipe, fit, None, paths, policy)
    used = {one.name: predicted.get(one.name, one.limit / 2) / one.limit for one in made.limits}
    outcome = Outcome(metrics=predicted, used=used)
    return made.model_copy(update={"workload": workload, "outcome": outcome})


def changed(model: ModelT, **values: Any) -> ModelT:
    """A copy of a model with other values; `recipe__sla` is the key `sla` of its `recipe`."""
    update: dict[str, Any] = {}
    for path, value in values.items():
        key, _, inner = path.partition("__")
        before = update.get(key, getattr(model, key))
        update[key] = changed(before, **{inner: value}) if inner else value
    return model.model_copy(update=update)


def on(device: str) -> Fit:
    """The samples' fit, measured on another device."""
    return changed(samples.fit(), engine__device=device)


def order(made: Plan, **options: object) -> Order:
    text = file_text(made)
    return Order(made, text, Options(**options))  # type: ignore[arg-type]
