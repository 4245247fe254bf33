"""llmctl: measure an LLM engine, fit it, find the scheduler that serves best, and start exactly
that.
"""

import sys

from toolkit.compiled import Finder

__version__ = "0.1.0"

sys.meta_path.insert(0, Finder())
