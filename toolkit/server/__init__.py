"""The server: OpenAI's API on one asyncio loop, whatever answers behind it.

`Server` (`server`) has the life of the process, `Application` what is the same on HTTP, and
`ServerBackend` (`backend`) what is the same in the way of a request. Our own workers answer through
`engine` and `driver`, which runs the scheduler on the real clock as the simulator does on a virtual
one; replicas through `pool` and `relay`. A recorder is a pool of one replica with a log.
"""
