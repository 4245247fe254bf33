"""Small files of every source read as they did when these digests were taken.

PYTHONPATH=. python tests/test_traces_frozen.py    # takes them anew: where a reading was to change
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from divided import divide_lengths

from toolkit.traces.chats import TokenCounter
from toolkit.traces.generate import Arrivals, Lengths, SharedContent, generate
from toolkit.traces.growth import Growth, grown
from toolkit.traces.read import read_trace
from toolkit.traces.repeat import repeated
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import excerpt, leave_out_longer, scale_lengths

FROZEN = Path(__file__).parent / "data" / "frozen"
SAMPLES = sorted((FROZEN / "traces").iterdir())
DIGESTS = FROZEN / "traces.json"


def sha256(values: object) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype=np.int64).tobytes()).hexdigest()


def microseconds(times_s: np.ndarray) -> np.ndarray:
    return np.rint(times_s * 1e6)


def digests(trace: Trace) -> dict[str, object]:
    """The digest of each array. Ids of blocks count by the order in which they first stand."""
    found: dict[str, object] = {
        "requests": len(trace),
        "arrivals": sha256(microseconds(trace.arrival_s)),
        "prompts": sha256(trace.prompt_tokens),
        "outputs": sha256(trace.output_tokens),
        "limits": sha256(trace.max_tokens),
        "priorities": sha256(trace.priorities),
    }
    if trace.sessions is not None:
        found["previous"] = sha256(trace.sessions.previous)
        found["think"] = sha256(microseconds(trace.sessions.think_s))
    if trace.shared is not None:
        _, firsts, ids = np.unique(trace.shared.ids, return_index=True, return_inverse=True)
        found["block_tokens"] = trace.shared.block_tokens
        found["blocks"] = sha256(np.argsort(np.argsort(firsts))[ids.reshape(-1)])
        found["offsets"] = sha256(trace.shared.offsets)
    return found


def read(path: Path) -> Trace:
    return read_trace(path, counter=TokenCounter(lambda text: -(-len(text) // 4), "made"))[0]


def made() -> dict[str, Trace]:
    """Traces that are cut, scaled, repeated, grown and generated."""
    chat = excerpt(read(trace_path("chat-small")), 0.0, 30.0)
    mooncake, sessions, log = (
        read(FROZEN / "traces" / name) for name in ("mooncake.jsonl", "sessions.jsonl", "log.csv")
    )
    content = SharedContent(100, 3, Lengths("uniform", 20, 90))
    lengths = Lengths("lognormal", 80, 1.0, 500), Lengths("pareto", 20, 1.1, 300)
    return {
        "chat-small": read(trace_path("chat-small")),
        "bursty-small": read(trace_path("bursty-small")),
        "chat-small scaled": scale_lengths(chat, 512, 128),
        "chat-small that fits": leave_out_longer(chat, 512, 128),
        "sessions scaled": scale_lengths(sessions, 512, 128),
        "sessions divided": divide_lengths(sessions, 3.0),
        "mooncake divided": divide_lengths(mooncake, 10.79),
        "mooncake repeated": repeated(mooncake, 3),
        "sessions repeated": repeated(sessions, 3, 5),
        "chat-small repeated": repeated(chat, 2),
        "sessions grown": grown(sessions, [Growth.parsed("0-0.005=2")], None, 3)[0],
        "log grown": grown(log, [Growth.parsed("4-5=1.5")], 4 * 3600.0, 0)[0],
        "generated": generate(Arrivals(3.0, 2.0), 40.0, *lengths, 7),
        "generated with templates": generate(Arrivals(1.0), 40.0, *lengths, 7, content),
    }


@pytest.fixture(scope="module")
def taken() -> dict[str, dict[str, object]]:
    return json.loads(DIGESTS.read_text())


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_a_sample_of_each_source_reads_as_before(path, taken):
    assert digests(read(path)) == taken[path.name]


def test_traces_are_made_as_before(taken):
    found = {name: digests(trace) for name, trace in made().items()}
    assert found == {name: taken[name] for name in found}
    assert found.keys() | {path.name for path in SAMPLES} == taken.keys()


if __name__ == "__main__":
    every = {path.name: digests(read(path)) for path in SAMPLES}
    every |= {name: digests(trace) for name, trace in made().items()}
    DIGESTS.write_text(json.dumps(every, indent=1) + "\n")
