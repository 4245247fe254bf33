"""The metrics of vLLM that rules and dashboards read: each sample's name, and its labels."""

ENGINE = {"model_name", "engine"}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = ("prompt_tokens", "generation_tokens", "num_preemptions")
HISTOGRAMS = (
    "time_to_first_token",
    "inter_token_latency",
    "request_time_per_output_token",
    "e2e_request_latency",
    "request_queue_time",
)
VLLM = {
    **{f"vllm:{name}": ENGINE for name in GAUGES},
    **{f"vllm:{name}_total": ENGINE for name in COUNTERS},
    **{f"vllm:{name}_seconds_bucket": {*ENGINE, "le"} for name in HISTOGRAMS},
    **{f"vllm:{name}_seconds_{part}": ENGINE for name in HISTOGRAMS for part in ("sum", "count")},
    "vllm:request_success_total": {*ENGINE, "finished_reason"},
}
