"""Measuring an engine: a grid of prefills and decode steps, the memory edge, slices and rounds."""
