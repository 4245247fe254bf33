"""vLLM's scheduler for models with several groups of KV caches: full attention beside sliding
windows, chunks of local attention, and states (Mamba, linear attention).

All groups take their blocks from one pool, and each has a table of blocks for every row. In the
order of use:

- `pool`: the blocks, and those of them that a later request can find;
- `row`: a request with its tables;
- `full`, `window`, `chunk`, `state`: what each kind of group needs, keeps, gives back and finds;
- `caches`: all groups of a model together: what is found in all of them, and room for a pass;
- `scheduler`: the passes.

vLLM 0.32 and 0.33: `v1/core/block_pool.py`, `single_type_kv_cache_manager.py`,
`kv_cache_coordinator.py`, `kv_cache_manager.py`, `sched/scheduler.py`. Models with one group of
full attention have the faster scheduler of `toolkit.sim.paged`.
"""
