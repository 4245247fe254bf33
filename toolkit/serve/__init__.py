"""The scheduler on the real clock: an asyncio driver over workers, and OpenAI's API in front of it."""
