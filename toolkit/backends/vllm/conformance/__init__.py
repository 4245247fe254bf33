"""Whether the simulator's model of vLLM's scheduler agrees with an installed vLLM, pass by pass.

`workloads` makes requests and flags up; `child`, in vLLM's Python, runs them through vLLM's own
`Scheduler` and `AsyncScheduler` without an engine, a model or a GPU (`driven`); `kinds` has one
file per kind of cache or server, each with workloads and with the simulator's passes for them;
`run` compares, and `results` keeps what came out, by version.
"""
