"""Measurements of this project, run from the repository root: `python -m benchmarks.GROUP.NAME`.

The groups: `papers` (what scheduling papers claim, simulated and live), `serving` (a running
server), `engines` (the computation, ours beside others, and vLLM live), `public` (what others
measured) and `gpu` (the whole workflow on a GPU). `common` holds what they share, some of it with
the tests.
"""
