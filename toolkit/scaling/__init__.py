"""How many replicas run: the same rule on the simulator's clock and on the real one."""
