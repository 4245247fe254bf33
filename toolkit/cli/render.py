"""`llmctl render`: make a plan from a recipe, its fit and its tuning, or files for a target of it.

In order: the options; the plan (`_make`), which is written or compared; and with --target the files
of the target (`_render`), written to a folder or compared with it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    FIT_HELP,
    BrokenOption,
    JsonOption,
    SetOption,
    command_of,
    parse_settings,
    resolve_fit,
)
from toolkit.cli.basis import (
    accept,
    analytic_notes,
    find_validation,
    note_basis,
    plan_of_fleet,
    plan_of_recipe,
)
from toolkit.cli.output import emit, note, table
from toolkit.errors import InputError, TargetMissedError

if TYPE_CHECKING:
    from toolkit.deploy.order import Order
    from toolkit.files.plan import Plan, PlannedPolicy

# of the predicted metrics, those that are shown; the plan has all
HEADLINES = {"goodput_rps", "throughput_rps", "ttft_p99_s", "tpot_mean_s", "e2e_p95_s"}
PLAN = Path("plan.json")
_cluster = partial(typer.Option, rich_help_panel="Files of a target")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """The command line of `llmctl render`."""

    source: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|FLEET|PLAN.json",
            autocompletion=arguments.recipes_and_plans,
            help="A recipe with --fit, a fleet, or a plan with --target.",
        ),
    ]
    fit: Annotated[
        Path | None,
        typer.Option(
            callback=resolve_fit,
            autocompletion=arguments.fits,
            help=f"The fit of a recipe: {FIT_HELP}",
        ),
    ] = None
    tuning: Annotated[
        Path | None,
        typer.Option(help="tuning.json; without it the plan has the recipe's policy."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            autocompletion=arguments.policy,
            help="Use this policy instead of the tuning's, with the parameters of --set.",
        ),
    ] = None
    settings: SetOption = None
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            autocompletion=arguments.rendered_targets,
            help="Write files for local, systemd, compose, kubernetes, kuberay, ray, vllm or "
            "sglang; see docs/how-to/deploy.md.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write to this file, or with --target to this folder; default: plan.json, or a "
            "folder named like the target.",
        ),
    ] = None
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Write nothing; compare with --out, and exit with 4 if it differs."
        ),
    ] = False
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Render settings that are predicted to break limits; with --target, overwrite "
            "files that were changed.",
        ),
    ] = False
    allow_broken_limits: BrokenOption = False
    trace: Annotated[
        str | None,
        typer.Option(
            help="Take lengths for the autoscaling threshold from this trace; default: the "
            "tuning's, if it ships, or the recipe's.",
        ),
    ] = None
    image: Annotated[str, _cluster(help="Container image, pinned by tag or digest.")] = ""
    namespace: Annotated[str, _cluster(help="Kubernetes namespace.")] = "default"
    replicas: Annotated[
        int, _cluster(min=0, help="The number of pods; 0: as the tuning found, or 1.")
    ] = 0
    max_replicas: Annotated[
        int,
        _cluster(
            min=0,
            help="The largest number of pods, in a fleet of each kind; 0: twice the replicas.",
        ),
    ] = 0
    prometheus: Annotated[
        str,
        _cluster(
            show_default=False,
            help="URL of Prometheus in the cluster, for KEDA; default: the operator's service in "
            "namespace monitoring.",
        ),
    ] = "http://prometheus-operated.monitoring.svc:9090"
    model_claim: Annotated[
        str,
        _cluster(help="Volume claim that keeps the models; '': each pod downloads them again."),
    ] = ""
    gpu_product: Annotated[
        list[str] | None,
        _cluster(
            metavar="NAME",
            help="Require nodes with this nvidia.com/gpu.product; repeatable. Default: prefer the "
            "fit's.",
        ),
    ] = None
    program: Annotated[
        str, _cluster(help="Path of llmctl on the machine that runs the systemd unit.")
    ] = "/opt/llmctl/bin/llmctl"
    replica_image: Annotated[
        str,
        _cluster(help="Image of an engine's own server, pinned; default: the engine's tried one."),
    ] = ""
    replica_python: Annotated[
        str, _cluster(help="Path of the engine's Python on the machine that runs the units.")
    ] = "/opt/vllm/bin/python"
    as_json: JsonOption = False


@command_of(RenderOptions)
def command(given: RenderOptions) -> None:
    """Write the plan that `llmctl serve` starts, and print the source of every value.

    With --target the plan becomes a folder of files for the place where it will run, explained in
    EXPLAIN.md, with a bench.sh that checks its predictions. The same files give the same output,
    byte for byte; --check is for CI.
    """
    from toolkit.deploy.order import ALLOW_BROKEN
    from toolkit.files.io import write_file
    from toolkit.files.tuning import broken

    made = _make(given)
    allowed = given.force or given.allow_broken_limits
    accept(made.plan, str(given.tuning or given.source), broken=allowed)
    if given.target is not None:
        _render(made, given.target, given)
        return
    if made.file is not None:
        raise InputError(
            f"{given.source} is already a plan", "add --target for files of a place to run it"
        )
    out = given.out or PLAN
    if given.check:
        _compare(made.plan, out, given.as_json)
        return
    write_file(made.plan, out)
    emit(given.as_json, made.plan, lambda: _show(made.plan))
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


def _policy(given: RenderOptions) -> PlannedPolicy | None:
    """The policy of --policy and --set."""
    from toolkit.files.plan import PlannedPolicy

    if given.policy is None:
        if given.settings:
            raise InputError("--set needs --policy", "add --policy NAME")
        return None
    return PlannedPolicy(name=given.policy, parameters=parse_settings(given.settings))


def _make(given: RenderOptions) -> Made:
    """The plan of the arguments. `InputError` where they do not belong together."""
    from toolkit.files.fleet import is_fleet
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.shipped import is_recipe, recipe_path

    source, policy = given.source, _policy(given)
    if not is_recipe(source):
        if given.fit or given.tuning or policy:
            raise InputError(
                "a plan holds its fit, tuning and policy", "give a recipe to make another plan"
            )
        return Made(read_file(Plan, source), source, source)
    if is_fleet(source):
        if given.fit is not None:
            raise InputError("--fit: a fleet names its fits itself", "leave --fit out")
        plan, near = plan_of_fleet(source, given.tuning, policy)
        return Made(plan, None, near)
    if given.fit is None:
        recipe_path(source)  # a missing recipe is reported first
        raise InputError("a recipe needs its fit", "add --fit fit.json, from `llmctl fit`")
    return Made(plan_of_recipe(source, given.fit, given.tuning, policy), None, given.fit)


def _show(plan: Plan) -> None:
    from toolkit.files.plan import PREDICTED

    rows = [
        (key, item.value, item.source)
        for key, item in plan.explained.items()
        if not key.startswith(PREDICTED) or key.removeprefix(PREDICTED) in HEADLINES
    ]
    table(
        ["what", "<planned", "because"],
        rows,
        title=f"{plan.recipe.name}: {plan.recipe.description}".rstrip(": "),
    )


def _compare(plan: Plan, existing: Path, as_json: bool) -> None:
    from toolkit.deploy.plan import differences
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan

    found = differences(read_file(Plan, existing), plan)
    rows = [(each.key, each.old, each.new) for each in found]
    show = partial(table, ["value", "<in the file", "<now"], rows)
    emit(as_json, {"differences": found}, show if found else partial(print, "up to date"))
    if found:
        raise TargetMissedError(
            f"{existing} is out of date: {len(found)} values differ", "run it without --check"
        )


def _render(made: Made, target: str, given: RenderOptions) -> None:
    """Write the target's folder, or compare it. `TargetMissedError` where a comparison finds
    differences.
    """
    from toolkit.deploy.reckon import default_trace, ttft_targets
    from toolkit.deploy.render import changes, manifest_of, render_target, write

    folder, recipe = given.out or Path(target), made.plan.recipe
    order = _order(made, folder, given)
    files = render_target(target, order)
    if given.check:
        found = changes(files, folder)
        shown = "\n".join(each.diff.rstrip("\n") for each in found) or "up to date"
        emit(given.as_json, {"changes": found}, lambda: print(shown))
        if found:
            names = ", ".join(each.file for each in found)
            raise TargetMissedError(f"{folder} is out of date: {names}", "run it without --check")
        return
    manifest = manifest_of(files, target, order.name, order.stamp())
    write(files, folder, manifest, force=given.force)
    rows = [(str(folder / name), f"{len(content.encode()):,}") for name, content in files.items()]
    written = {"folder": str(folder), **manifest.model_dump()}
    emit(given.as_json, written, lambda: table(["file", ">bytes"], rows))
    for line in analytic_notes(made.plan.fit):
        note(line)
    if order.trace is None and ttft_targets(recipe):
        lengths = f"computed for the lengths of {default_trace(recipe)}"
        note(f"no --trace was given: the number that may wait is {lengths}")
    if order.validation:
        note(order.validation.summary())
    note(f"{folder / 'EXPLAIN.md'} explains each value, and how to start the server")


def _order(made: Made, folder: Path, given: RenderOptions) -> Order:
    from toolkit.deploy.order import Options, Order
    from toolkit.deploy.render import digest, shipped_trace
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    text, fit = _plan_text(made, folder), made.plan.inputs.get("fit")
    validation = find_validation(made.near, fit.sha256) if fit else None
    options = Options(
        image=given.image,
        namespace=given.namespace,
        replicas=given.replicas,
        max_replicas=given.max_replicas,
        prometheus=given.prometheus,
        model_claim=given.model_claim,
        program=given.program,
        folder=str(folder.absolute()),
        gpu_products=tuple(given.gpu_product or ()),
        replica_image=given.replica_image,
        replica_python=given.replica_python,
    )
    name = given.trace or shipped_trace(made.plan)
    trace = read_trace(trace_path(name))[0] if name else None
    return Order(made.plan, text, digest(text.encode()), options, validation, trace)


def _plan_text(made: Made, folder: Path) -> str:
    """The plan's text. An equal plan in the folder stays as it is, since it may have been made on
    another machine.

    A plan there that cannot be read, such as one of another version of llmctl, counts as different.
    """
    from toolkit.deploy.plan import differences
    from toolkit.files.io import file_text, read_file
    from toolkit.files.plan import Plan

    if made.file is not None:
        return made.file.read_text(encoding="utf-8")
    for existing in (folder / "plan.json", folder / "core" / "plan.json"):
        with contextlib.suppress(InputError):
            if existing.is_file() and not differences(read_file(Plan, existing), made.plan):
                return existing.read_text(encoding="utf-8")
    return file_text(made.plan)
