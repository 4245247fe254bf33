"""`llmctl render`: make a plan from a recipe, its fit and its tuning, or files for a target of it.

In order: the options; the plan (`_make`), which is written or compared; and with --target the files
of the target (`render_to`), written to a folder or compared with it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import (
    FIT_HELP,
    BrokenOption,
    JsonOption,
    SetOption,
    parse_settings,
    resolve_fit,
)
from toolkit.cli.output import emit, note, table

if TYPE_CHECKING:
    from toolkit.deploy.folder import Change
    from toolkit.deploy.order import Options, Order
    from toolkit.deploy.plan import Difference
    from toolkit.files.plan import Plan, PlannedPolicy
    from toolkit.traces.types import Trace

PREDICTED = "predicted "
HEADLINES = {
    PREDICTED + name
    for name in ("goodput_rps", "throughput_rps", "ttft_p99_s", "tpot_mean_s", "e2e_p95_s")
}
PLAN = Path("plan.json")
CLUSTER = "Files of a target"  # a heading of --help
Source = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE|FLEET|PLAN.json",
        autocompletion=completion.recipes_and_plans,
        help="A recipe with --fit, a fleet, or a plan with --target.",
    ),
]
FitOption = Annotated[
    Path | None,
    typer.Option(
        "--fit",
        callback=resolve_fit,
        autocompletion=completion.fits,
        help=f"The fit of a recipe: {FIT_HELP}",
    ),
]
TuningOption = Annotated[
    Path | None,
    typer.Option("--tuning", help="tuning.json; without it the plan has the recipe's policy."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        autocompletion=completion.policy,
        help="Use this policy instead of the tuning's, with the parameters of --set.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        autocompletion=completion.rendered_targets,
        help="Write files for local, systemd, compose, kubernetes, kuberay, ray, vllm or sglang; "
        "see docs/how-to/deploy.md.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Write to this file, or with --target to this folder; default: plan.json, or a folder "
        "named like the target.",
    ),
]
CheckOption = Annotated[
    bool,
    typer.Option(
        "--check", help="Write nothing; compare with --out, and exit with 4 if it differs."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Render settings that are predicted to break limits; with --target, overwrite files "
        "that were changed.",
    ),
]
TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace",
        help="Take lengths for the autoscaling threshold from this trace; default: the"
        " tuning's, if "
        "it ships, or the recipe's.",
    ),
]
ImageOption = Annotated[
    str,
    typer.Option(
        "--image", rich_help_panel=CLUSTER, help="Container image, pinned by tag or digest."
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", rich_help_panel=CLUSTER, help="Kubernetes namespace.")
]
ReplicasOption = Annotated[
    int,
    typer.Option(
        "--replicas",
        min=0,
        rich_help_panel=CLUSTER,
        help="The number of pods; 0: as the tuning found, or 1.",
    ),
]
MaxReplicasOption = Annotated[
    int,
    typer.Option(
        "--max-replicas",
        min=0,
        rich_help_panel=CLUSTER,
        help="The largest number of pods; 0: twice the replicas.",
    ),
]
PrometheusOption = Annotated[
    str,
    typer.Option(
        "--prometheus",
        show_default=False,
        rich_help_panel=CLUSTER,
        help="URL of Prometheus in the cluster, for KEDA; default: the operator's service in "
        "namespace monitoring.",
    ),
]
ClaimOption = Annotated[
    str,
    typer.Option(
        "--model-claim",
        rich_help_panel=CLUSTER,
        help="Volume claim that keeps the models; '': each pod downloads them again.",
    ),
]
ProductOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu-product",
        metavar="NAME",
        rich_help_panel=CLUSTER,
        help="Require nodes with this nvidia.com/gpu.product; repeatable. Default: prefer the "
        "fit's.",
    ),
]
ProgramOption = Annotated[
    str,
    typer.Option(
        "--program",
        rich_help_panel=CLUSTER,
        help="Path of llmctl on the machine that runs the systemd unit.",
    ),
]


def command(
    source: Source,
    fit: FitOption = None,
    tuning: TuningOption = None,
    policy: PolicyOption = None,
    settings: SetOption = None,
    target: TargetOption = None,
    out: OutOption = None,
    check: CheckOption = False,
    force: ForceOption = False,
    allow_broken_limits: BrokenOption = False,
    trace: TraceOption = None,
    image: ImageOption = "",
    namespace: NamespaceOption = "default",
    replicas: ReplicasOption = 0,
    max_replicas: MaxReplicasOption = 0,
    prometheus: PrometheusOption = "http://prometheus-operated.monitoring.svc:9090",
    model_claim: ClaimOption = "",
    gpu_product: ProductOption = None,
    program: ProgramOption = "/opt/llmctl/bin/llmctl",
    as_json: JsonOption = False,
) -> None:
    """Write the plan that `llmctl serve` starts, and print the source of every value.

    With --target the plan becomes a folder of files for the place where it will run, explained in
    EXPLAIN.md, with a bench.sh that checks its predictions. The same files give the same output,
    byte for byte; --check is for CI.
    """
    from toolkit.cli.basis import accept

    made = _make(source, fit, tuning, _given(policy, settings))
    accept(made.plan, str(tuning or source), broken=force or allow_broken_limits)
    if target is not None:
        from toolkit.deploy.order import Options

        folder = out or Path(target)
        options = Options(
            image,
            namespace,
            replicas,
            max_replicas,
            prometheus,
            model_claim,
            program,
            str(folder.absolute()),
            tuple(gpu_product or ()),
        )
        render_to(
            RenderRequest(
                made.plan,
                made.file,
                made.near,
                target,
                folder,
                options,
                trace,
                check,
                force,
                as_json,
            )
        )
        return
    if made.file is not None:
        from toolkit.errors import InputError

        raise InputError(
            f"{source} is already a plan", "add --target for files of a place to run it"
        )
    if check:
        _compare(made.plan, out or PLAN, as_json)
        return
    from toolkit.cli.basis import note_basis
    from toolkit.deploy.order import ALLOW_BROKEN
    from toolkit.files.io import write_file
    from toolkit.files.tuning import broken

    out = out or PLAN
    write_file(made.plan, out)
    emit(as_json, made.plan, lambda: _show(made.plan))
    note_basis(made.plan.fit, made.near)
    allowance = f" {ALLOW_BROKEN}" if broken(made.plan.limits) else ""
    note(f"wrote {out}; start it with: llmctl serve {out}{allowance}")


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, the file that it was read from (None: it was made here), and a file beside which its
    validation may lie.
    """

    plan: Plan
    file: Path | None
    near: Path


def _given(policy: str | None, settings: list[str] | None) -> PlannedPolicy | None:
    """The policy of --policy and --set."""
    from toolkit.errors import InputError
    from toolkit.files.plan import PlannedPolicy

    if policy is None:
        if settings:
            raise InputError("--set needs --policy", "add --policy NAME")
        return None
    return PlannedPolicy(name=policy, parameters=parse_settings(settings))


def _make(source: Path, fit: Path | None, tuning: Path | None, given: PlannedPolicy | None) -> Made:
    from toolkit.cli.basis import plan_of_recipe
    from toolkit.errors import InputError
    from toolkit.files.fleet import is_fleet
    from toolkit.files.io import read_file, recipe_path
    from toolkit.files.plan import Plan
    from toolkit.files.shipped import is_recipe

    if not is_recipe(source):
        if fit or tuning or given:
            raise InputError(
                "a plan holds its fit, tuning and policy", "give a recipe to make another plan"
            )
        return Made(read_file(Plan, source), source, source)
    if is_fleet(source):
        return _make_of_fleet(source, fit, tuning, given)
    if fit is None:
        recipe_path(source)  # a missing recipe is reported first
        raise InputError("a recipe needs its fit", "add --fit fit.json, from `llmctl fit`")
    return Made(plan_of_recipe(source, fit, tuning, given), None, fit)


def _make_of_fleet(
    source: Path, fit: Path | None, tuning: Path | None, given: PlannedPolicy | None
) -> Made:
    from toolkit.cli.basis import plan_of_fleet
    from toolkit.errors import InputError

    if fit is not None:
        raise InputError("--fit: a fleet names its fits itself", "leave --fit out")
    plan, near = plan_of_fleet(source, tuning, given)
    return Made(plan, None, near)


def _show(plan: Plan) -> None:
    shown = {
        key: item
        for key, item in plan.explained.items()
        if not key.startswith(PREDICTED) or key in HEADLINES
    }
    rows = [(key, item.value, item.source) for key, item in shown.items()]
    table(
        ["what", "<planned", "because"],
        rows,
        title=f"{plan.recipe.name}: {plan.recipe.description}".rstrip(": "),
    )


def _compare(plan: Plan, existing: Path, as_json: bool) -> None:
    from toolkit.deploy.plan import differences
    from toolkit.errors import TargetMissedError
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan

    found = differences(read_file(Plan, existing), plan)
    emit(as_json, {"differences": found}, lambda: _show_differences(found))
    if found:
        raise TargetMissedError(
            f"{existing} is out of date: {len(found)} values differ", "run it without --check"
        )


def _show_differences(found: list[Difference]) -> None:
    if found:
        table(["value", "<in the file", "<now"], [(each.key, each.old, each.new) for each in found])
    else:
        print("up to date")


@dataclass(frozen=True, slots=True)
class RenderRequest:
    """What to render. `near` is a file beside which a validation.json about its fit may lie."""

    plan: Plan
    plan_file: Path | None
    near: Path
    target: str
    folder: Path
    options: Options
    trace: str | None
    check: bool
    force: bool
    as_json: bool


def render_to(request: RenderRequest) -> None:
    """Write the folder, or compare it. `TargetMissedError` where a comparison finds differences."""
    from toolkit.cli.basis import note_analytic
    from toolkit.deploy.folder import changes, manifest_of, write
    from toolkit.deploy.reckon import default_trace, ttft_targets
    from toolkit.deploy.render import render_target

    order = _order(request)
    files = render_target(request.target, order)
    if request.check:
        _compare_folder(request, changes(files, request.folder))
        return
    manifest = manifest_of(files, request.target, order.name, order.stamp())
    write(files, request.folder, manifest, force=request.force)
    emit(
        request.as_json,
        {"folder": str(request.folder), **manifest.model_dump()},
        lambda: _show_files(request.folder, files),
    )
    note_analytic(request.plan.fit)
    if order.trace is None and ttft_targets(request.plan.recipe):
        trace = default_trace(request.plan.recipe)
        note(
            f"no --trace was given: the number that may wait is computed for the lengths of {trace}"
        )
    if order.validation:
        note(order.validation.summary())
    note(f"{request.folder / 'EXPLAIN.md'} explains each value, and how to start the server")


def _order(request: RenderRequest) -> Order:
    from toolkit.cli.basis import find_validation
    from toolkit.deploy.folder import digest
    from toolkit.deploy.order import Order

    text, fit = _plan_text(request), request.plan.inputs.get("fit")
    validation = find_validation(request.near, fit.sha256) if fit else None
    return Order(
        request.plan, text, digest(text.encode()), request.options, validation, _trace(request)
    )


def _plan_text(request: RenderRequest) -> str:
    """The plan's text. An equal plan in the folder stays as it is, since it may have been made on
    another machine.

    A plan there that cannot be read, such as one of another version of llmctl, counts as different.
    """
    from toolkit.deploy.plan import differences
    from toolkit.errors import InputError
    from toolkit.files.io import file_text, read_file
    from toolkit.files.plan import Plan

    if request.plan_file is not None:
        return request.plan_file.read_text(encoding="utf-8")
    for existing in (request.folder / "plan.json", request.folder / "core" / "plan.json"):
        with contextlib.suppress(InputError):
            if existing.is_file() and not differences(read_file(Plan, existing), request.plan):
                return existing.read_text(encoding="utf-8")
    return file_text(request.plan)


def _trace(request: RenderRequest) -> Trace | None:
    """The given trace, or the tuning's if it ships."""
    from toolkit.deploy.render import shipped_trace
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    name = request.trace or shipped_trace(request.plan)
    return read_trace(trace_path(name))[0] if name else None


def _show_files(folder: Path, files: dict[str, str]) -> None:
    rows = [(str(folder / name), f"{len(content.encode()):,}") for name, content in files.items()]
    table(["file", ">bytes"], rows)


def _compare_folder(request: RenderRequest, found: list[Change]) -> None:
    from toolkit.errors import TargetMissedError

    emit(request.as_json, {"changes": found}, lambda: _show_changes(found))
    if found:
        names = ", ".join(each.file for each in found)
        raise TargetMissedError(
            f"{request.folder} is out of date: {names}", "run it without --check"
        )


def _show_changes(found: list[Change]) -> None:
    print("\n".join(each.diff.rstrip("\n") for each in found) if found else "up to date")
