"""llmctl: measure an LLM engine, fit it, find the scheduler that serves best, and start exactly
that.
"""

from toolkit.compiled import install

__version__ = "0.1.0"

install()
