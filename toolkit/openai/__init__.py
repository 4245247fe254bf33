"""OpenAI's API on the wire: requests, answers, streams of events and errors, without I/O.

Our own server, the front before replicas, the load generator and the profiler of
servers from outside read and write it here.
"""
