"""What a real vLLM resolved, as its own scheduler classes have it.

The test runs if vLLM is installed or VLLM_PYTHON names the Python of an environment that has it.
"""

import json
import subprocess
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from real_vllm import PYTHON, needed

from toolkit.backends.vllm.conformance.run import prepare
from toolkit.catalogue.classes import of_resolved
from toolkit.catalogue.resolved import Resolved

CASE = {
    "block_tokens": 16,
    "blocks": 50,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "prefix_caching": True,
    "watermark": 0.1,
    "ahead": False,
    "requests": [],
}
WINDOW = {"kind": "window", "block": 16, "window": 40}
FULL = {"kind": "full", "block": 16}
STATE = {"kind": "state", "block": 16, "mode": "align"}
DRAFTS = {"method": "ngram", "tokens": 3, "accepts": []}
CASES = [
    CASE,
    CASE | {"groups": [WINDOW, FULL]},
    CASE | {"groups": [STATE, FULL]},
    CASE | {"drafts": DRAFTS},
]
PRINT = """
import dataclasses, json, os, sys
from toolkit.backends.vllm.conformance import driven
os.environ |= driven.ENVIRONMENT
driven.as_cpu_build()
from toolkit.backends.vllm.resolved import resolved_of
made = [driven.DrivenScheduler(sys.argv[1], case) for case in json.loads(sys.argv[2])]
found = [resolved_of(one.scheduler) for one in made]
print(json.dumps([dataclasses.asdict(one) for one in found]))
"""


@needed
@pytest.mark.slow
def test_what_vllm_resolved_is_read_from_its_scheduler(tmp_path: Path) -> None:
    model, environment = prepare(tmp_path)
    done = subprocess.run(
        [PYTHON, "-c", PRINT, model, json.dumps(CASES)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    read = TypeAdapter(list[Resolved]).validate_json(done.stdout.splitlines()[-1], strict=True)
    plain, windows, states, drafts = read
    assert of_resolved(plain) == []
    assert (plain.blocks, plain.watermark) == (50, 0.1)
    assert (plain.max_in_flight_tokens, plain.tp, plain.policy) == (64, 1, "fcfs")
    assert [(one.kind, one.window) for one in windows.groups] == [("window", 40), ("full", 0)]
    assert [(one.kind, one.mode) for one in states.groups] == [("state", "align"), ("full", "")]
    assert drafts.drafts is not None
    assert (drafts.drafts.method, drafts.drafts.tokens) == ("ngram", 3)
    assert {one.name for one in of_resolved(windows)} == {"windows"}
    assert {one.name for one in of_resolved(states)} == {"states"}
    assert of_resolved(drafts) == []
