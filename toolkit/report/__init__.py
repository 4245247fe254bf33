"""One offline HTML page about a recipe: its fit, its tuning, its validation, its plan, and where each came from."""
