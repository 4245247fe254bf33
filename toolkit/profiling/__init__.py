"""Measuring an engine: the grid, the memory edge, whole slices; a journal that survives kill -9."""
