"""OpenAI-compatible servers seen from outside: found, asked for their dialect, timed per token."""
