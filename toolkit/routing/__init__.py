"""Which replica of an engine gets a request: the same code behind the simulator and the front."""
