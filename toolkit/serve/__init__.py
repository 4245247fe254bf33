"""The live server: OpenAI's API in front, the scheduler in the middle, workers behind, on one
asyncio loop.

`driver` is the second clock of the scheduler (the simulator is the first); `api` speaks HTTP and
knows no scheduler; `server` starts and ends it all. Replies meet in `reply`: the driver writes, a
response reads.
"""
