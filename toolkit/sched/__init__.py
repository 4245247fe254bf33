"""The scheduler: a sans-IO state machine and its policies.

It has no clock, does no I/O, uses no framework, and draws random numbers only from a given seed.
`types` has the data types, `scheduler` the state machine, `waiting`, `queues` and `caches` what it
keeps, `view` and `memory` what a policy reads, `protocols` the laws, `kernels` the compiled
arithmetic, and `policies` one file per policy. The simulator and the live server run the same code.
"""
