"""One offline HTML page about a recipe: its verdict, benches, validation, tuning, fit and plan."""
