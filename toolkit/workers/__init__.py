"""Engines in their own processes: typed frames over socket pairs, a child process that serves, and
a pool that keeps it running.

The server and the profiler run their slices through the same pool, so the profile measures what
serves.
"""
