"""vLLM, whole: its command line, its profile, its launch, and what runs inside it."""
