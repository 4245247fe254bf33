"""The live server: OpenAI's API, the scheduler, and the workers, on one asyncio loop.

`driver` runs the scheduler on the real clock, as the simulator does on a virtual one. `api` and
`generation` speak HTTP and do not know the scheduler. The driver writes each answer into a `Reply`
(`live`), from which a response reads. `launch` starts and stops all of it.
"""
