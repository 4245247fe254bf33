"""Engines in processes of their own: typed frames over socket pairs, a child that serves, a pool
that keeps it alive.

Both the server and the profiler run their slices through the same pool, so what is measured is what
serves.
"""
