"""The scheduler: a sans-IO state machine and its policies. No clock, no I/O, no framework, no
randomness of its own.

`types` are the nouns, `protocols` the seams, `scheduler` the machine, `kernels` the compiled
arithmetic, `policies` one file each. The simulator and the live server drive the very same code.
"""
