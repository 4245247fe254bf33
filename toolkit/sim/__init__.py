"""The scheduler on a virtual clock: a heap of events, and workers that compute many steps at once
by the fitted laws.
"""
