"""Workloads: arrival times and lengths, read, written, generated, cut into windows. Text never."""
