"""The scheduler: a sans-IO state machine and its policies.

It has no clock, does no I/O, uses no framework, and draws random numbers only from a given seed.
`types` has the data types, `protocols` the interfaces, `scheduler` the state machine, `kernels` the
compiled arithmetic, and `policies` one file per family of policies. The simulator and the live
server run the same code.
"""
