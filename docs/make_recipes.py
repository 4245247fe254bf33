"""Makes the shipped recipes that `llmctl recipe new` writes, and the JSON Schema of recipes, which
editors use: `make reference`.

    python -m docs.make_recipes

They have no profiles: the laws of vLLM on these GPUs are computed where they are used. Recipes that
were written by hand (for the papers, for measured GPUs, for CPUs) are left alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from toolkit.catalogue.gpus import GPUS
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.recipe import recipe_schema
from toolkit.files.shipped import shipped_recipes


@dataclass(frozen=True, slots=True)
class Made:
    """A recipe that is made: a known model, a GPU, and further wishes (`Wish`)."""

    model: str
    gpu: str
    wish: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The recipe, as `llmctl recipe new` prints it."""
        return new_recipe(find_model(self.model), Wish(GPUS[self.gpu], **self.wish)).text


FP8_ON_TWO: dict[str, Any] = {"gpus": 2, "tensor_parallel": 2, "quantization": "fp8"}
ON_FOUR: dict[str, Any] = {"gpus": 4, "tensor_parallel": 4}
LONG_ON_ONE: dict[str, Any] = {"gpus": 1, "tensor_parallel": 1, "max_model_len": 16_384}
RECIPES = (
    Made("llama-3.1-8b", "h100-sxm"),
    Made("llama-3.1-8b", "l40s"),
    Made("llama-3.3-70b", "h100-sxm", ON_FOUR),
    Made("llama-3.3-70b", "h200", FP8_ON_TWO),
    Made("qwen3-8b", "h100-sxm"),
    Made("qwen3-32b", "h100-sxm"),
    Made("qwen3-32b", "h100-sxm", LONG_ON_ONE),
    Made("qwen3-32b", "h200"),
    Made("qwen3-30b-a3b", "h100-sxm"),
    Made("qwen3-30b-a3b", "h200"),
    Made("mistral-small-24b", "h100-sxm"),
)


def names_and_texts() -> dict[str, str]:
    """Each recipe's text by its name."""
    found = {}
    for recipe in RECIPES:
        text = recipe.text()
        [line] = [line for line in text.splitlines() if line.startswith("name: ")]
        found[line.removeprefix("name: ").strip('"')] = text
    return found


if __name__ == "__main__":
    schema = json.dumps(recipe_schema(), indent=2)
    (shipped_recipes() / "recipe.schema.json").write_text(f"{schema}\n", encoding="utf-8")
    for name, text in names_and_texts().items():
        (shipped_recipes() / f"{name}.yaml").write_text(text, encoding="utf-8")
