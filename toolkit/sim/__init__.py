"""The scheduler on a virtual clock: a heap of events and workers that leap over the steps by the
fitted laws.
"""
