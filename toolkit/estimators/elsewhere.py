"""How far analytic predictions were off beside servers that others measured.

`elsewhere.json` has the errors of the commands themselves by GPU and class of model
(`benchmarks.public.product`, docs/results/scoreboard.md).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.files.profile import AnalyticError

FILE = Path(__file__).with_name("elsewhere.json")


@cache
def _content() -> dict[str, Any]:
    with FILE.open(encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def measured_elsewhere(gpu: str, *, experts: bool) -> AnalyticError:
    """The errors of predictions of servers on this GPU, by its name in `measured_gpus`, with models
    of the same class; those of all servers, and no GPU, where there are none.
    """
    for group in _content()["groups"]:
        if (group["gpu"], group["experts"]) == (gpu, experts):
            return AnalyticError(**{key: group[key] for key in group if key != "experts"})
    return AnalyticError(**_content()["all"])


def error_words(error: AnalyticError, *, experts: bool) -> str:
    """An error of `measured_elsewhere` as commands quote it."""
    off = (
        f"TPOT {error.tpot_percent:g} % off in the median, {error.tpot_p90_percent:g} at p90, TTFT "
        f"{error.ttft_percent:g} and {error.ttft_p90_percent:g} %, over"
    )
    kind = "models with experts" if experts else "dense models"
    if error.gpu is None:
        compared = f"all {error.servers} servers that were compared"
        return f"never compared on this GPU with {kind}; {off} {compared}, none of them such"
    return f"{off} {error.servers} measured servers of this GPU with {kind}"
