"""vLLM: its command line, its profile, its launch, and the code that runs inside it."""
