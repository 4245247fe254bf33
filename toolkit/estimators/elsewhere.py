"""How far analytic predictions were off where others measured: the scoreboard in one line.

`elsewhere.json` has the median errors by GPU, kind of model and version of vLLM
(`benchmarks.public.scoreboard`, docs/results/scoreboard.md).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("elsewhere.json")
CHIPS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300"}


@cache
def _groups() -> list[dict[str, Any]]:
    with FILE.open(encoding="utf-8") as file:
        found: list[dict[str, Any]] = json.load(file)["groups"]
    return found


def measured_elsewhere(gpu: str, *, experts: bool) -> str:
    """The errors of predictions of servers on this GPU, by its name in `measured_gpus`, with the
    same kind of model; "": others measured none.

    Of several groups it is the one with the most rows.
    """
    groups = [one for one in _groups() if (one["gpu"], one["experts"]) == (gpu, experts)]
    if not groups:
        return ""
    most = max(groups, key=lambda one: int(one["rows"]))
    kind = "with experts" if experts else "dense"
    version = f", vLLM {most['version']}" if most["version"] else ""
    return (
        f"measured elsewhere: TPOT within {most['tpot_percent']:g} % and TTFT within "
        f"{most['ttft_percent']:g} % in the median of {most['rows']} rows of {CHIPS[gpu]} "
        f"({kind}{version})"
    )
