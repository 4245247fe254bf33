"""Optuna over the simulator."""
