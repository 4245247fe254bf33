"""`llmctl schema`: the JSON Schema of recipes, for editors and for checks outside this tool."""

from __future__ import annotations

import json


def command() -> None:
    """Print the JSON Schema of recipes, as in recipes/recipe.schema.json."""
    from toolkit.files.recipe import Recipe

    print(json.dumps(Recipe.model_json_schema(), indent=2))
