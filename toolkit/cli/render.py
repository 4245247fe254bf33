"""`llmctl render`: make a plan from a recipe, its fit and its tuning, or files of a target."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    ScenarioOptions,
    argument,
    command_of,
    keep_inputs,
    option,
    refuse_useless,
)
from toolkit.cli.basis import analytic_notes, find_bench, note_basis, warn_broken
from toolkit.cli.output import emit, note, show
from toolkit.cli.scenario import Scenario
from toolkit.errors import InputError
from toolkit.files.io import file_text, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.shipped import is_recipe, recipe_path
from toolkit.files.tuning import Settings, breaks, broken
from toolkit.report.parts import Cell, Sheet, Table
from toolkit.report.rows import plan_sheet
from toolkit.report.steps import typed

if TYPE_CHECKING:
    from toolkit.deploy.order import Order

_cluster = partial(option, rich_help_panel="Files of a target")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions(ScenarioOptions):
    source: Path = argument(
        "A recipe, or a plan with --target.",
        metavar="RECIPE|PLAN.json",
        autocompletion=arguments.recipes,
    )
    policy: str | None = option(
        None,
        "Without a tuning: use this policy instead of the recipe's, with the parameters of --set.",
        autocompletion=arguments.policies,
    )
    scaling: Path | None = option(
        None,
        "scaling.json, from `llmctl autoscale`: replicas come and go by its best rule.",
    )
    rule: str | None = option(
        None, "Take this rule of --scaling; `static`: a fixed number.", metavar="NAME"
    )
    target: str | None = option(
        None,
        "Write files for local, systemd, compose, kubernetes or vllm; see docs/how-to/deploy.md.",
        metavar="TARGET",
    )
    out: Path | None = option(
        None,
        "Write to this file, or with --target to this folder; default: plan.json, or a folder "
        "named like the target.",
    )
    force: bool = option(
        False,
        "Make a plan although its settings are predicted to break limits; with --target, "
        "overwrite files that were changed by hand.",
    )
    lengths: str | None = option(
        None,
        "Take lengths for the autoscaling threshold from this trace; default: the tuning's, found "
        "by its digest here, beside the fit or the tuning, or as the recipe names it.",
        "--trace",
        autocompletion=arguments.traces,
    )
    templates: Path | None = _cluster(
        None,
        "Fill the templates of this folder, a changed copy of templates/TARGET; those that are not "
        "in it are the shipped ones.",
        metavar="FOLDER",
    )
    image: str = _cluster("", "Container image, pinned by tag or digest.")
    namespace: str = _cluster("default", "Kubernetes namespace.")
    replicas: int = _cluster(0, "The number of pods; 0: as the tuning found, or 1.", min=0)
    prometheus: str = _cluster(
        "http://prometheus-operated.monitoring.svc:9090",
        "URL of Prometheus in the cluster, for KEDA; default: the operator's service in namespace "
        "monitoring.",
        show_default=False,
    )
    model_claim: str = _cluster(
        "", "Volume claim that keeps the models; '': each pod downloads them again."
    )
    fronts: int = _cluster(
        1, "Front pods before replicas of vLLM; deployment.yaml says what they share.", min=1
    )
    gateway: str = _cluster(
        "",
        "Gateway of Gateway API through which clients outside the cluster reach /v1: write the "
        "overlay gateway/ for it.",
        metavar="NAMESPACE/NAME",
    )
    prefix: str = _cluster(
        "",
        "Folder on the machine that runs the systemd units, such as /etc/llmctl: the files are "
        "copied to a folder of the deployment's name in it; '': they stay where they are written.",
        metavar="FOLDER",
    )
    replica_image: str = _cluster(
        "", "Image of an engine's own server, pinned; default: the engine's tried one."
    )


@command_of(RenderOptions, "fit", "tuning", "settings")
def command(args: RenderOptions) -> None:
    """Write the plan that `llmctl serve` starts, and print the source of every value.

    With --target the plan becomes a folder of files for the place where it will run: each value
    with its reason beside it, the commands that start it at the head, and a bench.sh that checks
    its predictions. The same files give the same output, byte for byte.
    """
    plan, near = _plan(args)
    warn_broken(plan, str(args.tuning or args.source))
    if args.target is not None:
        _render(plan, near, args.target, args)
        return
    if not is_recipe(args.source):
        raise InputError(
            f"{args.source} is already a plan", "add --target for files of a place to run it"
        )
    out = args.out or Path("plan.json")
    write_file(plan, out)
    emit(args.as_json, plan, lambda: show(plan_sheet(plan)))
    note_basis((plan.fit, near if "fit" in plan.inputs else None))
    scales = plan.settings.scaling is not None
    following = ("render", out, "--target", "kubernetes") if scales else ("serve", out)
    note(f"wrote {out}", f"next: {typed(*following)}")


def _plan(args: RenderOptions) -> tuple[Plan, Path]:
    """Return the plan, read or made, and the file beside which its bench may lie: the plan's own,
    the fit's, or the recipe's where the laws are computed.

    Raises InputError for arguments that contradict each other, and without --force for a new plan
    that is predicted to break limits; `Scenario.open` and `make_plan` say what else is refused.
    """
    from toolkit.sched.policies.parameters import from_words

    settings = None
    if args.policy is not None:
        refuse_useless({"--tuning": args.tuning}, "--policy takes the place of what it recommends")
        settings = Settings(policy=args.policy, parameters=from_words(args.settings or []))
        refuse_useless({"--policy": args.policy if args.scaling else None}, "--scaling has its own")
    elif args.settings:
        raise InputError("--set needs --policy", "add --policy NAME")
    if args.scaling is None:
        refuse_useless({"--rule": args.rule}, "it is a rule of --scaling", "add --scaling FILE")
    if not is_recipe(args.source):
        if args.fit or args.tuning or settings or args.scaling:
            raise InputError(
                "a plan holds its fit, tuning, policy and rule",
                "give a recipe to make another plan",
            )
        return read_file(Plan, args.source), args.source
    scenario = Scenario.open(replace(args, recipe=recipe_path(args.source), settings=None))
    if args.scaling is not None:
        plan = scenario.scaled_plan(args.scaling, args.rule, force=args.force)
    else:
        plan = scenario.make_plan(settings)
    near = scenario.fit_file or args.source
    if broken(plan.limits) and not args.force:
        raise InputError(
            f"{args.tuning or args.source}: its settings are predicted to {breaks(plan.limits)}",
            "tune again: other policies, a recipe of another engine, a lower --rate, more workers; "
            "or make the plan anyway: --force",
        )
    return plan, near


def _render(plan: Plan, near: Path, target: str, args: RenderOptions) -> None:
    """Write the target's folder."""
    from toolkit.deploy.reckon import default_trace, ttft_targets
    from toolkit.deploy.render import render_target, unknown_templates, write

    folder = args.out or Path(target)
    if args.templates:
        unknown = ", ".join(unknown_templates(args.templates, target))
        note(*([f"no template of {target} has these names: {unknown}"] if unknown else []))
    order = _order(plan, near, folder, args)
    files = render_target(target, order)
    inputs = {"source": args.source, "fit": args.fit, "tuning": args.tuning, "trace": args.lengths}
    inputs["scaling"] = args.scaling
    for name, content in files.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != content.encode():
            keep_inputs(inputs | {"out": folder / name})
    manifest = write(files, folder, target, force=args.force)
    sizes: list[list[Cell]] = [
        [str(folder / name), len(text.encode())] for name, text in files.items()
    ]
    sheet = Sheet("plan", "", tables=[Table("", ["file", "bytes"], sizes)])
    written = {"folder": str(folder), **manifest.model_dump()}
    emit(args.as_json, written, lambda: show(sheet))
    note(*analytic_notes(plan.fit.engine))
    tuned = plan.inputs.get("trace")
    if order.trace is None and tuned is not None and ttft_targets(plan.recipe):
        note(
            f"the tuning's trace {tuned.name} is not here, so no file says how many requests may "
            "wait: name it with --trace"
        )
    elif order.trace is None and ttft_targets(plan.recipe):
        lengths = f"computed for the lengths of {default_trace(plan.recipe)}"
        note(f"no --trace was given: the number that may wait is {lengths}")
    if order.bench:
        note(order.bench.summary())
    note(f"next: as the head of {folder / next(iter(files))} says")


def _order(plan: Plan, near: Path, folder: Path, args: RenderOptions) -> Order:
    from toolkit.deploy.order import Options, Order
    from toolkit.deploy.plan import differs
    from toolkit.deploy.reckon import tuned_trace
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    if not is_recipe(args.source):
        text = args.source.read_text(encoding="utf-8")
    else:
        text = file_text(plan)
        # An equal plan in the folder stays as it is: it may have been made on another machine. One
        # that cannot be read, such as one of another version of llmctl, counts as different.
        for existing in (folder / "base" / "plan.json", folder / "plan.json"):
            with contextlib.suppress(InputError):
                if existing.is_file() and not differs(read_file(Plan, existing), plan):
                    text = existing.read_text(encoding="utf-8")
    fit = plan.inputs.get("fit")
    bench = find_bench(near, fit.sha256) if fit else None
    options = Options(
        image=args.image,
        namespace=args.namespace,
        replicas=args.replicas,
        prometheus=args.prometheus,
        model_claim=args.model_claim,
        folder=str(folder.absolute()),
        fronts=args.fronts,
        gateway=args.gateway,
        prefix=args.prefix.rstrip("/"),
        replica_image=args.replica_image,
        templates=args.templates,
    )
    folders = [Path(), *(file.parent for file in (near, args.tuning, args.scaling) if file)]
    path = trace_path(args.lengths) if args.lengths else tuned_trace(plan, folders)
    trace = read_trace(path)[0] if path else None
    return Order(plan, text, options, bench, trace)
