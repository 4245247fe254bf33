"""`llmctl schema`: the JSON Schema of recipes, for editors and for checks outside this tool."""

from __future__ import annotations

import json

from toolkit.cli.arguments import JsonOption


def command(as_json: JsonOption = False) -> None:
    """Print the JSON Schema of recipes, as it stands in recipes/recipe.schema.json; --json prints
    it on one line.
    """
    from toolkit.files.recipe import recipe_schema

    print(json.dumps(recipe_schema(), indent=None if as_json else 2))
