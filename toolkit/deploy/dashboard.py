"""The dashboard for Grafana, over the metrics of a deployment.

Dashboards are files of `templates/grafana/` in Grafana's classic model, which every version
imports: `llmctl.json` with llmctl's metric names, and `vllm.json` with vLLM's and the panels that
vLLM has metrics for. The data source and the models are variables, so the files name no
installation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from toolkit.files.shipped import shipped_templates

Names = Literal["llmctl", "vllm"]  # the metric names that a dashboard reads

# vLLM's histograms of what targets are about. It has none of the longest gap in a request.
VLLM_LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}
GAP = "Longest gap in a request"  # the panel of what vLLM has no metric for
GAP_PLACE = {"h": 8, "w": 8, "x": 16, "y": 18}  # free on vLLM's dashboard, beside latencies


def dashboard(
    sla: Mapping[str, float] | None = None,
    names: Names = "llmctl",
    of: str = "",
    description: str = "",
    job: str = "",
    front: str = "",
) -> dict[str, Any]:
    """Return the dashboard, ready for `json.dumps`. The same arguments give the same dashboard.

    Args:
        sla: the targets of a recipe, drawn as dashed lines on the panels of their metrics.
        of: the name of the one deployment that the dashboard is for; '': any.
        description: where the dashboard comes from.
        job: the label of the deployment's series (`Values.job`), chosen at first; '': all.
        front: the label of the series of a front before servers of vLLM: it alone measures the
            longest gap of a request, and the dashboard shows it; '': there is none.
    """
    board = _shipped(names)
    if front:
        (panel,) = [panel for panel in _shipped("llmctl")["panels"] if panel["title"] == GAP]
        panel |= {"id": 1 + max(panel["id"] for panel in board["panels"]), "gridPos": GAP_PLACE}
        for target in panel["targets"]:
            target["expr"] = re.sub(r"\{model_name[^}]*\}", f'{{job="{front}"}}', target["expr"])
        board["panels"].append(panel)
    if of:
        board |= {"uid": of, "title": of}  # a uid has 40 characters at most
    board["description"] = description
    for variable in board["templating"]["list"]:
        if job and variable["name"] == "job":
            variable["current"] = {"text": job, "value": job}
    for panel in board["panels"]:
        read = " ".join(target["expr"] for target in panel.get("targets", ()))
        for key, limit in sorted((sla or {}).items(), key=lambda target: target[1]):
            metric = key.split("_")[0]
            shown = [f"llmctl_{metric}_seconds", f"llmctl_predicted_{metric}_seconds"]
            if any(name in read for name in [*shown, VLLM_LATENCIES.get(metric, shown[0])]):
                defaults = panel["fieldConfig"]["defaults"]
                defaults["thresholds"]["steps"].append({"color": "red", "value": limit})
                defaults["custom"]["thresholdsStyle"]["mode"] = "dashed"
    return board


def _shipped(names: Names) -> dict[str, Any]:
    file = shipped_templates() / "grafana" / f"{names}.json"
    board: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return board
