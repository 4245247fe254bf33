"""Whether the simulator's model of vLLM's scheduler agrees with an installed vLLM, pass by pass.

`cases` are workloads that ship: requests, flags and caches. `driven`, in vLLM's Python, runs them
through vLLM's own `Scheduler` and `AsyncScheduler` without an engine, a model or a GPU. `modelled`
plans them with the simulator, `run` compares the two, and `results` keeps the result by version.
"""
