"""`llmctl render --target`: the files of a target, written to a folder or held against what lies there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.output import emit, note, table

if TYPE_CHECKING:
    from toolkit.deploy.folder import Change
    from toolkit.deploy.order import Options, Order
    from toolkit.files.plan import Plan
    from toolkit.traces.types import Trace


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. `near` is a file beside which a validation.json about its fit may lie."""

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


def render_to(asked: Request) -> None:
    """Write the folder, or compare it. `TargetMissedError` where a comparison finds anything."""
    from toolkit.cli.basis import note_analytic
    from toolkit.deploy.folder import changes, manifest_of, write
    from toolkit.deploy.render import render_target
    from toolkit.deploy.threshold import DEFAULT_TRACE, ttft_targets

    order = _order(asked)
    files = render_target(asked.target, order)
    if asked.check:
        _compare(asked, changes(files, asked.folder))
        return
    manifest = manifest_of(files, asked.target, order.name, order.stamp())
    write(files, asked.folder, manifest, force=asked.force)
    emit(asked.as_json, {"folder": str(asked.folder), **manifest.model_dump()}, lambda: _show(asked.folder, files))
    note_analytic(asked.plan.fit)
    if order.trace is None and ttft_targets(asked.plan.recipe):
        note(f"no --trace was given: how many may wait is reckoned for the lengths of {DEFAULT_TRACE}, which ships")
    if order.validation:
        note(order.validation.summary())
    note(f"{asked.folder / 'EXPLAIN.md'} says where each value comes from, and how to start it")


def _order(asked: Request) -> Order:
    from toolkit.cli.basis import find_validation
    from toolkit.deploy.folder import digest
    from toolkit.deploy.order import Order

    text, fit = _plan_text(asked), asked.plan.inputs.get("fit")
    validation = find_validation(asked.near, fit.sha256) if fit else None
    return Order(asked.plan, text, digest(text.encode()), asked.options, validation, _trace(asked))


def _plan_text(asked: Request) -> str:
    """The plan's file. One in the folder that says the same stays: it may have been made on another machine.

    One that cannot be read, as of another version of llmctl, says something else.
    """
    from toolkit.deploy.compare import differences
    from toolkit.errors import InputError
    from toolkit.files.io import file_text, read_file
    from toolkit.files.plan import Plan

    if asked.plan_file is not None:
        return asked.plan_file.read_text(encoding="utf-8")
    for existing in (asked.folder / "plan.json", asked.folder / "core" / "plan.json"):
        with contextlib.suppress(InputError):
            if existing.is_file() and not differences(read_file(Plan, existing), asked.plan):
                return existing.read_text(encoding="utf-8")
    return file_text(asked.plan)


def _trace(asked: Request) -> Trace | None:
    """The trace that was given, or the tuning's where it ships."""
    from toolkit.deploy.claims import shipped_trace
    from toolkit.traces.read import read_trace
    from toolkit.traces.shipped import trace_path

    name = asked.trace or shipped_trace(asked.plan)
    return read_trace(trace_path(name))[0] if name else None


def _show(folder: Path, files: dict[str, str]) -> None:
    rows = [(str(folder / name), f"{len(content.encode()):,}") for name, content in files.items()]
    table(["file", ">bytes"], rows)


def _compare(asked: Request, found: list[Change]) -> None:
    from toolkit.errors import TargetMissedError

    emit(asked.as_json, {"changes": found}, lambda: _show_changes(found))
    if found:
        names = ", ".join(each.file for each in found)
        raise TargetMissedError(
            f"{asked.folder} differs from what would be rendered: {names}", "run it without --check"
        )


def _show_changes(found: list[Change]) -> None:
    print("\n".join(each.diff.rstrip("\n") for each in found) if found else "up to date")
