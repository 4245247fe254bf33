"""A reverse proxy in front of any OpenAI-compatible server that records lengths and times, and changes nothing else."""
