"""A small recipe, a fit and laws, fixed, for tests and benchmarks. The numbers are made up."""

import toolkit
from toolkit.estimators.laws import LinearLaw
from toolkit.files.fit import (
    Fit,
    LawFit,
    MemoryFit,
    OverheadFit,
)
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.files.strict import Environment
from toolkit.laws.passes import HeldOutError, PassLaw, PassRange

ENVIRONMENT = Environment(
    python="3.11", platform="test", processor="test", cpu_count=2, packages={}, device="cpu"
)
ERROR = HeldOutError(median_percent=1.0, p95_percent=2.0, worst_percent=3.0, points=10)


def bilinear_law(
    p: tuple[float, float, float, float],
    d: tuple[float, float, float, float],
    prefill_emits_token: bool = False,
) -> LinearLaw:
    """Return Eq. 3 and 4 as the SCLS paper writes them: p = (p1..p4) and d = (d1..d4), in seconds
    per N*L, per N, per L, and constant.
    """
    return LinearLaw(
        PassLaw(dict(zip(("token", "row", "length", "pass"), p, strict=True))),
        PassLaw(dict(zip(("cached", "row", "length", "pass"), d, strict=True))),
        prefill_emits_token,
    )


def latency(term: str, nl: float, n: float, l: float, const: float) -> LawFit:  # noqa: E741
    law = PassLaw(
        {"pass": const, "row": n, "length": l, term: nl},
        valid=PassRange(rows_max=32, length_max=512),
        error=ERROR,
    )
    return LawFit(law=law)


def fit(
    capacity_tokens: int = 8192, workers: int = 2, zeta_std: float = 0.02, engine: str = "fake"
) -> Fit:
    facts = EngineFacts(
        engine=engine,
        engine_version=toolkit.__version__,
        model_type="fake",
        parameters=0,
        dtype="float32",
        device="none",
        threads=1,
        kv_bytes_per_token=4096,
        kv_budget_bytes=4096 * capacity_tokens,
        capacity_tokens=capacity_tokens,
        max_model_len=512,
        vocab_size=512,
        prefill_emits_token=True,
    )
    return Fit(
        tool_version="0",
        environment=ENVIRONMENT,
        inputs={},
        recipe_name="test",
        workers=workers,
        engine=facts,
        prefill=latency("token", 2e-5, 1e-4, 1e-6, 4e-3),
        decode=latency("cached", 5e-7, 1e-4, 1e-7, 4e-3),
        overhead=OverheadFit(batch_s=0.002, stretch=1.1, error=ERROR),
        memory=MemoryFit(
            form="zeta",
            capacity_tokens=capacity_tokens,
            kv_bytes_per_token=4096,
            zeta=0.9,
            zeta_std=zeta_std,
        ),
    )


def recipe(**changes: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "test",
            "model": {
                "source": "random",
                "config": {"model_type": "llama"},
                "dtype": "float32",
                "max_model_len": 512,
            },
            "hardware": {"device": "cpu", "name": "any"},
            "engine": {"name": "fake"},
            "workers": 2,
            "profile": {
                "batch_sizes": [1],
                "input_lengths": [8],
                "cached_lengths": [8],
                "memory_lengths": [8],
            },
            "sla": {"ttft_p99_s": 2.0, "e2e_p95_s": 8.0},
            "policy": {"name": "slice", "parameters": {"slice_tokens": 128}},
            "tune": {"trials": 8, "window_s": 10, "load": 1.0, "policies": ["own"]},
            "serve": {"max_new_tokens": 128},
            **changes,
        }
    )
