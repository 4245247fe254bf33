"""Facts that recipes are made of: GPUs, and the sizes of models.

The figures are YAML under data/. Nothing here loads a model, needs torch or a network, or knows
what a recipe is.
"""
