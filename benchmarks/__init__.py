"""Measurements of this project: run one from the repository root, `python -m benchmarks.GROUP.NAME --help`."""
