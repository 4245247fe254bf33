"""A running vLLM, tuned without a restart, and kept tuned."""
