"""A running vLLM, tuned without a restart."""
