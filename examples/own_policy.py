"""A policy of one's own beside those that ship: `python examples/own_policy.py`."""

from toolkit import api


@api.policy("half-promised")
class HalfPromisedPolicy(api.ContinuousPolicy):
    """Admit while prompts and a share of what the rows may still generate fit into the cache."""

    share: float = api.parameter(
        0.5, low=0, high=1, search=(0, 1), doc="share of the outputs' limits"
    )

    def admissible(self, worker: api.Worker, job: api.Job, footprint: api.Footprint) -> bool:
        prompts = footprint.taken_with(job.length)
        promised = footprint.promised_with(job.limit_tokens)
        return prompts + self.share * (promised - prompts) <= worker.capacity_tokens


experiment = api.open_experiment(
    "bursty-small", "llama-3.1-8b-a100-80gb", rate_rps=5, capacity_tokens=20_000
)
for policy in ("conservative", "past-future", HalfPromisedPolicy(), HalfPromisedPolicy(share=0.1)):
    found = experiment.run(policy).metrics({"ttft_p99_s": 2, "mtpot_p99_s": 1})
    name = policy if isinstance(policy, str) else f"{policy.name} {policy.share}"
    print(f"{name:18} goodput {found['goodput_rps']:.2f}/s, TTFT p99 {found['ttft_p99_s']:.1f} s")
