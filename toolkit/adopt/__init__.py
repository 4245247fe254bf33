"""Servers that people run already, as recipes: from a command, a values file, a manifest."""
