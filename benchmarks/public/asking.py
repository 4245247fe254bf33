"""A measured server in llmctl's words: its recipe, its requests, and the prediction of its times.

`Question.predict` calls the product's functions; `Question.type` types the commands that a user
would type, which call the same functions:

    llmctl recipe new MODEL --gpu GPU --tensor-parallel-size N > recipe.yaml
    llmctl profile recipe.yaml --analytic; llmctl fit profile.json
    llmctl simulate recipe.yaml --fit fit.json --trace FILE --concurrency N --json

No law, no constant and no simulation is here. A row says its model, GPU, precision, parallelism,
lengths and concurrency; the flags of its protocol are in `benchmarks.public.servers`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from benchmarks.public.operators import CORE, GPUS
from benchmarks.public.servers import (
    IN_MXFP4,
    IN_NVFP4,
    MODELS,
    Protocol,
    Row,
    protocol_of,
    trace_of,
)
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.layers import experts_of, text_config
from toolkit.catalogue.models import kv_bytes_per_token
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import EngineConstants
from toolkit.files.find_model import find_model
from toolkit.files.fit import Fit
from toolkit.files.io import head
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.profile import MEASURED_SECTIONS
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.profiling.analytic import ONE_BY_ONE, analytic_fit
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.world import policy_for
from toolkit.traces.windows import prepare
from toolkit.traces.write import write_trace

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
KEPT = {True: ["lm_head", "*self_attn*"], False: ["lm_head"]}  # in 16 bits; True: with experts
USUAL_LENGTH = 8192  # `max_model_len` where --max-model-len is not given
Fits = dict[tuple[str, EngineConstants | None], Fit]  # by the measured sections of a recipe
FULL_PERCENT = 97.0  # of its memory: the cache was full at some time


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as `recipe new` takes it: its config.json, and what vLLM shall quantize it to."""

    config: Mapping[str, Any]
    quantization: str = ""


def checkpoint_of(data: Path, row: Row) -> Checkpoint:
    """Return the checkpoint of a row's model in its precision; `data`: of aiconfigurator."""
    narrow = IN_NVFP4.get(row.model) if row.precision == "fp4" else None
    path = data / CORE / "model_configs" / f"{narrow or MODELS[row.model]}_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if narrow:
        return Checkpoint(config)
    if row.precision == "fp4" and row.model not in IN_MXFP4:
        kept = KEPT["num_local_experts" in config]
        return Checkpoint(config | {"quantization_config": {**NVFP4, "exclude_modules": kept}})
    if row.precision == "fp8" and "quantization_config" not in config:
        return Checkpoint(config, "fp8")
    return Checkpoint(config)


@dataclass(frozen=True, slots=True)
class Times:
    """Means over the requests of a run in seconds, and whether its cache was full at some time."""

    ttft_s: float
    tpot_s: float
    full: bool


class Question:
    """What llmctl is asked about a row."""

    def __init__(self, row: Row, checkpoint: Checkpoint, protocol: Protocol | None = None) -> None:
        self.row = row
        self._checkpoint = checkpoint
        self._protocol = protocol or protocol_of(row)
        self._recipe: Recipe | None = None

    @property
    def longest(self) -> int | None:
        """`max_model_len` of the server; None: the recipe's default."""
        longest = self._protocol.longest or self.row.prompt + self.row.output
        return longest if self._protocol.longest or longest > USUAL_LENGTH else None

    @property
    def has_experts(self) -> bool:
        """Whether its model is a mixture of experts."""
        return experts_of(text_config(self._checkpoint.config))[0] > 0

    @property
    def whole_experts(self) -> bool:
        """Whether the server ran with expert parallelism."""
        return self._protocol.whole_experts and self.row.ranks > 1

    def recipe_text(self, made: str) -> str:
        """Return the recipe that `recipe new` made, with the server's flags."""
        row = self.row
        protocol = self._protocol
        recipe = yaml.safe_load(made)
        recipe["policy"]["parameters"] = {
            "max_num_seqs": min(protocol.rows, protocol.tokens),
            "max_num_batched_tokens": protocol.tokens,
        }
        recipe["engine"]["gpu_memory_utilization"] = protocol.share
        recipe["serve"]["max_new_tokens"] = row.output
        flags = recipe["engine"].setdefault("vllm", {})
        if not protocol.ahead:
            flags["args"] = [*flags.get("args", ()), ONE_BY_ONE]
        if protocol.cache_bytes == 1:
            flags["kv_cache_dtype"] = "fp8"
            found = kv_bytes_per_token(recipe["model"]["config"], "fp8")
            recipe["model"]["kv_bytes_per_token"] = found[0] if found else None
        return yaml.safe_dump(recipe)

    def recipe(self) -> Recipe:
        """Return the server's recipe. Raises `InputError` for a server that is refused."""
        if self._recipe is None:
            with TemporaryDirectory() as name:
                wish = Wish(
                    gpu=gpu_of(GPUS[self.row.gpu][0]),
                    tensor_parallel=self.row.ranks,
                    quantization=self._checkpoint.quantization,
                    max_model_len=self.longest,
                    expert_parallel=self.whole_experts,
                )
                made = new_recipe(find_model(str(self._write_model(Path(name)))), wish)
                path = Path(name, "recipe.yaml")
                path.write_text(self.recipe_text(made.text), encoding="utf-8")
                recipe = load_recipe(path)
            tune = recipe.tune.model_copy(update={"concurrency": self.row.concurrency})
            model = recipe.model.model_copy(update={"source": self.row.model})  # not its folder
            self._recipe = recipe.model_copy(update={"tune": tune, "model": model})
        return self._recipe

    def predict(self, fits: Fits, constants: EngineConstants | None = None) -> Times:
        """Return the times that the product predicts. Raises `InputError` for a refused server.

        Args:
            fits: laws that are known, to which new ones are added: rows of one engine share them.
            constants: of the engine; None: those that ship.
        """
        recipe = self.recipe()
        key = recipe.model_dump_json(include=set(MEASURED_SECTIONS)), constants
        if key not in fits:
            fits[key] = analytic_fit(recipe, head({}), constants)
        fit = fits[key]
        policy = policy_for(fit, recipe.policy.name, recipe.policy.parameters)
        trace = prepare(trace_of(self.row, self._protocol), recipe)
        workload = Workload(trace, recipe.tune.concurrency or 0)
        world = Deployment.of(recipe, fit).world(workload)
        return self._times(simulate(trace, policy, world).metrics({}))

    def type(self) -> Times:
        """Return the times that the commands print, each run as a process of its own."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            words = [str(self._write_model(folder)), "--gpu", GPUS[self.row.gpu][0]]
            words += ["--tensor-parallel-size", str(self.row.ranks)]
            if self._checkpoint.quantization:
                words += ["--quantization", self._checkpoint.quantization]
            if self.longest:
                words += ["--max-model-len", str(self.longest)]
            if self.whole_experts:
                words.append("--expert-parallel")
            recipe = folder / "recipe.yaml"
            recipe.write_text(self.recipe_text(llmctl("recipe", "new", *words, folder=folder)))
            llmctl("profile", "recipe.yaml", "--analytic", folder=folder)
            llmctl("fit", "profile.json", folder=folder)
            write_trace(trace_of(self.row, self._protocol), folder / "trace.jsonl")
            words = ["recipe.yaml", "--fit", "fit.json", "--trace", "trace.jsonl"]
            words += ["--concurrency", str(self.row.concurrency), "--json"]
            return self._times(json.loads(llmctl("simulate", *words, folder=folder)))

    def _write_model(self, folder: Path) -> Path:
        model = folder / self.row.model
        model.mkdir()
        (model / "config.json").write_text(json.dumps(self._checkpoint.config), encoding="utf-8")
        return model

    def _times(self, metrics: Mapping[str, float]) -> Times:
        served = metrics["requests"]
        if served != self._protocol.requests * self.row.concurrency:
            raise InputError(f"only {served:g} requests of the row are served")
        full = metrics["peak_memory_percent"] > FULL_PERCENT
        return Times(metrics["ttft_mean_s"], metrics["tpot_mean_s"], full)


def llmctl(*words: str, folder: Path) -> str:
    """Return what a command prints on stdout, run in `folder`."""
    command = [sys.executable, "-m", "toolkit", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True).stdout
