"""Two policies on one trace, and a plot: `python examples/two_policies.py`."""

from matplotlib import pyplot
from numpy import arange

from toolkit import api

experiment = api.open_experiment("bursty-small", "llama-3.1-8b-a100-80gb", rate_rps=20)
for policy in ("past-future", "fcfs"):
    result = experiment.run(policy)
    found = result.metrics({"ttft_p99_s": 2})
    print(f"{policy:12} goodput {found['goodput_rps']:.1f}/s, TTFT p99 {found['ttft_p99_s']:.2f} s")
    seconds = sorted(api.latencies_of(result)["ttft"])
    pyplot.plot(seconds, arange(1, len(seconds) + 1) / len(seconds), label=policy)
pyplot.gca().set(xlabel="time to first token, s", ylabel="share of requests")
pyplot.legend()
pyplot.savefig("ttft.svg")
