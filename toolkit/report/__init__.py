"""One offline HTML page about a recipe: its verdict, benches, tuning, fit and plan."""
