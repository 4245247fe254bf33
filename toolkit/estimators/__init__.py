"""The laws of time and memory, and how they are fitted to a profile."""
