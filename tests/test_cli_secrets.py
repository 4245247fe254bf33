"""A key from the environment is not readable any more once the server has it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os
from pathlib import Path
from toolkit.server.process import forget_variable
forget_variable("LLMCTL_API_KEY")
forget_variable("NOT_THERE")
shown = b"canary-7" in Path("/proc/self/environ").read_bytes()
print("LLMCTL_API_KEY" in os.environ, shown, os.environ["OTHER"])
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc here")
def test_a_variable_is_erased_from_the_process_memory_too():
    around = {
        "LLMCTL_API_KEY": "canary-7",
        "OTHER": "stays",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=around, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False stays\n"
