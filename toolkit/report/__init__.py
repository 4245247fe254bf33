"""One offline HTML page about a recipe: its verdict, then benches, validation, tuning, fit and
plan.
"""
