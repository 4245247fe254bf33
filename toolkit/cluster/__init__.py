"""Ray: the machines of a cluster as places for workers and for trials. Loaded only where a command
asks for it.

Ray pickles what it knows of us, by name: one class and one function of this package, which every
machine must have. Everything that is said to workers afterwards is bytes, typed frames. A cluster
runs code for whoever reaches it, which is why it has a token.
"""
