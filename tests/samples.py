"""Small, fixed inputs that several tests share; all numbers are made up. The recipe and the fit are
those of the benchmarks that serve the fake engine.
"""

from pathlib import Path
from typing import Any

from benchmarks.common.samples import ENVIRONMENT, ERROR, fit, latency, recipe
from toolkit.files.fit import Fit, StepsFit
from toolkit.files.io import head, processor, write_file
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.files.tuning import NO_OUTCOME, Evaluation, Outcome, Settings
from toolkit.laws.passes import PassLaw, PassRange
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import Task

__all__ = [
    "ENVIRONMENT",
    "ERROR",
    "HEAD",
    "chosen",
    "computes_nothing",
    "evaluation",
    "fit",
    "latency",
    "paged_fit",
    "plan",
    "recipe",
    "task",
    "vllm_fit",
    "write_fit",
]

# The common fields of a workflow file.
HEAD: Any = {"tool_version": "0", "environment": ENVIRONMENT, "inputs": {}}


def plan(recipe: Recipe, fit: Fit, policy: str = "vllm", **changes: Any) -> Plan:
    """A plan without predictions; the policy has its usual parameters."""
    settings = chosen(policy, **parameters(make_any(policy, {})))
    given: dict[str, Any] = {"recipe": recipe, "fit": fit, "workers": 1, "settings": settings}
    given |= HEAD | {"outcome": NO_OUTCOME, "explained": {}}
    return Plan(**given | changes)


def chosen(policy: str, /, **parameters: Any) -> Settings:
    """Settings: a policy with parameters, no router."""
    return Settings(policy=policy, parameters=parameters)


def task(
    *traces: Trace,
    settings: Settings | None = None,
    given: Recipe | None = None,
    laws: Fit | None = None,
    **others: Any,
) -> Task:
    """A recipe's own settings, or others, on these windows."""
    deployment = Deployment.of(given or recipe(), laws or fit())
    made = Task(deployment, [Workload(trace) for trace in traces], **others)
    return made.under(settings) if settings else made


def evaluation(
    policy: str,
    parameters: dict[str, Any],
    metrics: dict[str, float],
    used: dict[str, float] | None = None,
    router: RouterSpec | None = None,
) -> Evaluation:
    """Settings and their outcome."""
    settings = Settings(policy=policy, parameters=parameters, replica_router=router)
    return Evaluation(settings=settings, outcome=Outcome(metrics=metrics, used=used or {}))


def paged_fit(capacity_tokens: int = 4096) -> Fit:
    """A fit of vLLM, with the law of its passes: blocks of 16 tokens."""
    plain = fit(capacity_tokens, workers=1)
    law = PassLaw(
        {
            "pass": 4e-3,
            "row": 2e-5,
            "chunk": 5e-5,
            "cached": 4e-7,
            "attended": 1e-7,
            "host": 1e-4,
            "host_row": 3e-7,
        },
        (2e-4, 7e-5),
        (0, 8),
        error=ERROR,
        valid=PassRange(rows_max=64, tokens_max=2048, cached_max=4096),
    )
    steps = StepsFit(
        law=law, front_s=4e-3, front_row_s=1e-5, block_tokens=16,
        blocks=capacity_tokens // 16, async_scheduling=False,
    )  # fmt: skip
    return plain.model_copy(
        update={"engine": plain.engine.model_copy(update={"engine": "vllm"}), "steps": steps}
    )


def vllm_fit() -> Fit:
    """Of vLLM on a processor like this one."""
    made = fit(workers=1)
    here = {"engine": "vllm", "engine_version": "0.32.0", "device": "cpu", "processor": processor()}
    return made.model_copy(update={"engine": made.engine.model_copy(update=here)})


def write_recipe(at: Path, fitted: Fit, **changes: Any) -> None:
    """A recipe without targets, and fit.json beside it with these laws."""
    given = {"sla": {}, "workers": fitted.workers, "serve": {"max_new_tokens": 256}} | changes
    made = recipe(**given)
    write_file(made, at)  # JSON is YAML
    about = {"recipe_name": made.name, **head({"recipe": at})}
    write_file(fitted.model_copy(update=about), at.with_name("fit.json"))


def write_fit(recipe: Path) -> None:
    """profile.json without points and, made from it, fit.json, beside the recipe."""
    profile = recipe.with_name("profile.json")
    fitted = fit(engine="transformers")
    about: dict[str, Any] = {
        "recipe_name": "test",
        "workers": 2,
        "clock": "wall",
        "engine": fitted.engine,
    }
    empty: dict[str, Any] = {"prefill": [], "decode": [], "slices": [], "memory": []}
    write_file(Profile(**head({"recipe": recipe}), **about, **empty), profile)
    write_file(
        fitted.model_copy(update=dict(head({"profile": profile}))), recipe.with_name("fit.json")
    )


def computes_nothing(name: str, *, config: str = "", tune: str, port: int = 8000) -> str:
    """A recipe of a model that computes nothing, on two workers, with more keys of its fake engine
    (`config`) and of its `tune`.
    """
    return f"""
name: {name}
model:
  source: random
  config: {{model_type: fake, {config}}}
  dtype: float32
  tokenizer: bytes
  max_model_len: 512
hardware: {{device: cpu, name: none}}
engine: {{name: fake, kv_cache_memory_mib: 8}}
workers: 2
profile:
  batch_sizes: [1, 2, 4, 8]
  input_lengths: [16, 64, 128]
  cached_lengths: [16, 64, 128]
  memory_lengths: [64, 128]
  slice_tokens: [16]
  repeats: 2
  slices: 8
sla: {{ttft_p99_s: 5.0, e2e_p95_s: 10.0}}
tune: {{trials: 8, request_rate_rps: 20, {tune}}}
serve: {{max_new_tokens: 64, port: {port}}}
"""
