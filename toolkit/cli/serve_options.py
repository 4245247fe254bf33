"""What `llmctl serve` can be told on its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Source = Annotated[
    str | None,
    typer.Argument(metavar="PLAN.json|RECIPE|FOLDER", help="A plan, a recipe with --fit, or what was rendered."),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="TARGET", help="local, or of a rendered folder what it is for: systemd, compose, ray."
    ),
]
PlanOption = Annotated[Path | None, typer.Option("--plan", help="plan.json, from `llmctl render`.")]
FitOption = Annotated[Path | None, typer.Option("--fit", help="With a recipe: its fit.json; the plan is made here.")]
TuningOption = Annotated[Path | None, typer.Option("--tuning", help="With --fit: tuning.json.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Address to listen on; the recipe's by default.")]
PortOption = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one. The recipe's by default.")
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="LLMCTL_API_KEY",
        show_default=False,
        help="Asked of all clients; better in the environment.",
    ),
]
KeyFileOption = Annotated[
    Path | None, typer.Option("--api-key-file", help="A file with the key, as service managers hand out secrets.")
]
NameOption = Annotated[str, typer.Option("--served-model-name", help="What clients call the model.")]
PolicyOption = Annotated[str | None, typer.Option("--policy", help="Another policy than the plan's, with --set.")]
WorkersOption = Annotated[int | None, typer.Option("--workers", min=1, help="Another number than the plan's.")]
EventLogOption = Annotated[
    Path | None, typer.Option("--event-log", help="Write every call of the scheduler here; it replays exactly.")
]
RequestLogOption = Annotated[
    Path | None, typer.Option("--request-log", help="Write a trace of the requests here: lengths and times only.")
]
EndAfterOption = Annotated[
    bool,
    typer.Option("--allow-end-after", help="Let requests say where they end (llmctl_end_after), for replays."),
]
AdmissionOption = Annotated[
    Literal["targets", "queue"] | None,
    typer.Option(
        "--admission",
        help="Refuse who would miss the targets, or only who finds serve.max_waiting others; the recipe's by default.",
    ),
]
VllmOption = Annotated[bool, typer.Option("--vllm-metrics", help="Offer the metrics under vLLM's names, too.")]
OpenMetricsOption = Annotated[bool, typer.Option("--open-metrics", help="Let /metrics be read without the key.")]
StatusOption = Annotated[
    bool | None,
    typer.Option(
        "--status-page/--no-status-page",
        show_default=False,
        help="A page at / for people, without the key: sums, no requests. Default: where only this machine connects.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--shutdown-timeout", min=0, help="Seconds that running requests get after a signal.")
]
NoticeOption = Annotated[
    float, typer.Option("--shutdown-notice", min=0, help="Seconds of /ready 503 before requests are refused.")
]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="What the plan must be for; another engine has other laws.")
]
CheckOption = Annotated[
    float | None,
    typer.Option(
        "--check",
        min=0,
        show_default=False,
        help="Seconds of measuring points of the fit again before the first request; 3 by default, 0 for engine fake.",
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Do not serve where these are beyond the fit's stated error: exit code 4.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Serve though the fit is of another device, engine, version or model.")
]
RayOption = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="local|auto|HOST:PORT",
        help="Run the workers on a Ray cluster: a new one here, this machine's, or that of a head.",
    ),
]
InsecureOption = Annotated[bool, typer.Option("--insecure", help="Serve other machines without an API key.")]
