"""vLLM on a CPU, in the process that imports it, which asks nobody: for benches that look into its
engine.
"""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def bind(threads: int) -> dict[str, str]:
    """To the first processors."""
    return {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
