"""The shipped profile of vLLM on an H200, made from what was measured there on 26 November 2026.

    python -m benchmarks.engines.gpu_profile [--out FILE]

Takes a second. What was measured is docs/results/data/h200-profile.json.gz. llmctl of that day did
not record three things that the law of overlapping passes needs, and they are added here:

- The server's CUDA graphs and its executor. They follow from its arguments.
- Which passes began from idle. They follow from the requests that the profile sent (`from_idle`).

Times are rounded to 0.1 us, and the recipe is the shipped one. Without --out, nothing is written,
and the figures of the profile are shown. The law: llmctl fit FILE.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import markdown
from toolkit.files.io import record_inputs, write_text
from toolkit.files.shipped import recipe_path
from toolkit.files.strict import FORMAT

NAME = "llama-3.1-8b-h200-measured"
MEASURED = ROOT / "docs/results/data/h200-profile.json.gz"
DIGITS = 7  # of seconds
GRAPHS = {
    # vLLM's default list for max_num_seqs 1,024
    "graph_sizes": [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)],
    "graph_mode": "FULL_DECODE_ONLY",  # its argument -cc.cudagraph_mode
    "executor": "uni",  # one GPU: the scheduler's thread launches passes
}


def from_idle(points: Sequence[dict[str, Any]], grid: Sequence[dict[str, Any]]) -> list[bool]:
    """Return for each point whether its first pass began from idle.

    After a pass without a gap to the next one (`host_s`) no request was left, so the next pass
    began from idle. The exception are bursts of prompts with one output token each. Their first
    pass often took those prompts that had come, and left none; the others came while it ran. So
    such passes belong together where their rows make up a batch of the `grid`.
    """
    batches = defaultdict(set)
    for point in grid:
        batches[point["input_length"]].add(point["batch_size"])
    ends = [
        number
        for number, point in enumerate(points, start=1)
        if len(point["host_s"]) < len(point["seconds"])
    ]
    idle = [False] * len(points)
    begin = 0
    while begin < len(points):
        idle[begin] = True
        later = [end for end in ends if end > begin]
        whole = [end for end in later if _one_batch(points[begin:end], batches)]
        begin = whole[-1] if whole else later[0]
    return idle


def _one_batch(points: Sequence[dict[str, Any]], batches: Mapping[float, set[int]]) -> bool:
    """Whether these passes hold the prompts of one batch of the grid, all of a length."""
    lengths = {
        0 if point["decodes"] else point["prefill_tokens"] / point["prefills"] for point in points
    }
    rows = sum(point["prefills"] for point in points)
    return len(lengths) == 1 and rows in batches.get(lengths.pop(), ())


def read_measured() -> dict[str, Any]:
    """Return what was measured, with rounded times."""
    text = gzip.decompress(MEASURED.read_bytes())
    measured: dict[str, Any] = json.loads(text, object_hook=_rounded)
    return measured


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    times = found.get("seconds")
    if isinstance(times, list):
        return found | {"seconds": [round(one, DIGITS) for one in times]}
    if "prompt_tokens" in found:  # a point of the front
        return found | {"seconds": round(found["seconds"], DIGITS)}
    return found


def shipped_profile(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the profile that ships, with today's keys."""
    inputs = record_inputs({"recipe": recipe_path(NAME)})
    profile = measured | {
        "schema_version": FORMAT,
        "inputs": {role: one.model_dump(mode="json") for role, one in inputs.items()},
        "recipe_name": NAME,
    }
    del profile["hits"]  # of engine openai; there are none
    steps = dict(measured["steps"])
    points = steps.pop("points")
    front = steps.pop("front")
    marks = from_idle(points, measured["prefill"])
    marked = [
        point | {"idle": mark, "launch_s": []} for point, mark in zip(points, marks, strict=True)
    ]
    profile["steps"] = steps | GRAPHS | {"points": marked, "front": front}
    return profile


def text_of(profile: dict[str, Any]) -> str:
    """The profile as its file has it."""
    return json.dumps(profile, indent=2) + "\n"


def main() -> None:
    """Write the profile, or show how many passes it has."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the profile to FILE", metavar="FILE")
    given = parser.parse_args()
    profile = shipped_profile(read_measured())
    if given.out:
        write_text(given.out, text_of(profile))
    points = profile["steps"]["points"]
    passes = sum(len(point["seconds"]) for point in points)
    idle = sum(point["idle"] for point in points)
    print(markdown(["passes", "points", "from idle"], [[f"{passes:,}", f"{len(points):,}", idle]]))


if __name__ == "__main__":
    main()
