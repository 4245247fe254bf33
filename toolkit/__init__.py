"""llmctl: measure an LLM engine, fit it, find the scheduler that serves best, and start exactly
that.
"""

__version__ = "0.1.0"
