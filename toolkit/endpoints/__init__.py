"""OpenAI-compatible servers, seen from outside: found, asked how they want to be asked, and timed
token by token.
"""
