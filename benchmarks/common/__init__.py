"""What several benchmarks share, and the tests with them.

Importing it makes the engine `fake` (plugins/llmctl_fake.py) known here and in each process that is
started from here.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the repository
PLUGINS = str(Path(__file__).with_name("plugins"))

if PLUGINS not in sys.path:
    sys.path.append(PLUGINS)
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (known, PLUGINS)))
