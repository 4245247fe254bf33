"""Arguments and options that several commands share, their completion by the shell, and
`command_of`, which makes a command of a function that takes a dataclass.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

import toolkit
from toolkit.errors import InputError
from toolkit.files.io import check_writable, overwriting, shipped_fits
from toolkit.files.recipe import (
    MAX_WORKERS,
    MORE_WORKERS,
    WORKERS_LIMIT,
    Recipe,
    sla_problem,
)
from toolkit.files.shipped import load_recipe, recipe_path, shipped_names
from toolkit.sched.catalogue import ABOUT

UNIT_STEP = "unit-step"
TRACES = Path(toolkit.__file__).parent / "traces" / "data"  # the shipped ones
SLA_EXAMPLE = "ttft_p99_s=2"
CONTROL_KEY_VARIABLE = "LLMCTL_CONTROL_KEY"  # as in `endpoints.settings`, which is imported late
OUTPUTS = (
    "out",
    "plan_out",
    "html",
    "save_requests",
    "event_log",
    "pass_log",
    "request_log",
)  # parameters: files to write

T = TypeVar("T")


def completing(names: Callable[[], Iterable[str]], *patterns: str) -> Callable[[str], list[str]]:
    """What the shell completes: the `names`, and the files of the current folder with these
    patterns, that begin with the start of a word. Without it the shell completes files.
    """

    def complete(incomplete: str) -> list[str]:
        here = (path.name for pattern in patterns for path in Path().glob(pattern))
        return sorted({word for word in (*names(), *here) if word.startswith(incomplete)})

    return complete


recipes = completing(shipped_names, "*.yaml", "*.json")
fits = completing(shipped_fits, "*.json")
traces = completing(lambda: (path.stem for path in TRACES.iterdir()), "*.jsonl", "*.csv", "*.gz")
policies = completing(lambda: ABOUT)


def option(default: T, help: str, *names: str, **settings: Any) -> T:
    """A field that `command_of` makes an option; `settings` go to `typer.Option`.

    Without `names` the option is called like the field, and a switch that is off by default has no
    `--no-NAME`.
    """
    return field(default=default, metadata={"typer": typer.Option(*names, help=help, **settings)})


def argument(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """The same for an argument, required without a default; `settings` of `typer.Argument`."""
    return field(default=default, metadata={"typer": typer.Argument(help=help, **settings)})


def command_of(
    options: type[T], *shared: str
) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a command of a function that takes a dataclass of `JsonOptions`: its fields are the
    options.

    Args:
        shared: of a dataclass of `ScenarioOptions`, the fields of these that the command has, which
            come first. The function gets the defaults of the others.
    """
    hints = get_type_hints(options, include_extras=True)
    known = {one.name: one for one in fields(options)}  # type: ignore[arg-type]  # it is a dataclass
    common = {one.name: one for one in fields(ScenarioOptions)}
    own = [
        name for name, one in known.items() if name not in shared and one is not common.get(name)
    ]
    parameters = []
    for name in (*shared, *own, "as_json"):
        one = known[name]
        annotation = hints[name]
        if setting := one.metadata.get("typer"):
            if one.default is False and not setting.param_decls:
                setting.param_decls = (f"--{name.replace('_', '-')}",)
            annotation = Annotated[annotation, setting]
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        command.__doc__ = function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def keep_inputs(values: Mapping[str, object]) -> None:
    """Check that a command with these parameters can write its outputs, and writes over none of the
    files that it reads, also behind links. `InputError` names the output.

    Files that the command finds by itself are checked where they are written (`write_file`).
    """
    outputs = [str(values[name]) for name in OUTPUTS if values.get(name)]
    for place, out in enumerate(outputs):
        if any(_same_file(out, other) for other in outputs[:place]):
            raise InputError(f"{out}: two outputs would be the same file", "name two files")
    inputs = [file for name in values if name not in OUTPUTS for file in _files(name, values[name])]
    for out in outputs:
        if not values.get("target"):  # with it, the output of `render` is a folder
            check_writable(out)
        if os.path.isfile(out) and any(os.path.samefile(out, file) for file in inputs):
            raise overwriting(out)


def _same_file(one: str, other: str) -> bool:
    """Whether two outputs are one file; devices may be written twice."""
    both = os.path.realpath(one) == os.path.realpath(other)
    return both and (os.path.isfile(one) or not os.path.exists(one))


def _files(name: str, value: object) -> Iterator[str]:
    """The files that a parameter names: by their paths, as values of KEY=FILE, or by the name of a
    shipped trace.
    """
    if isinstance(value, list | tuple):
        for one in value:
            yield from _files(name, one)
    elif isinstance(value, str | Path):
        text = os.fspath(value)
        shipped = [str(file) for file in TRACES.iterdir() if name == "trace" and file.stem == text]
        candidates = [text, text.partition("=")[2], *shipped]
        yield from filter(os.path.isfile, candidates)


def resolve_recipe(recipe: Path | None) -> Path | None:
    """The file of a recipe, from its path or its name."""
    return None if recipe is None else recipe_path(recipe)


def limit_workers(workers: int | None) -> int | None:
    """The value of --workers. `InputError` above the limit of one scheduler."""
    if workers is not None and workers > MAX_WORKERS:
        raise InputError(f"--workers {workers}: {WORKERS_LIMIT}", MORE_WORKERS)
    return workers


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        callback=resolve_recipe,
        autocompletion=recipes,
        help="A recipe's file, or the name of a shipped recipe.",
    ),
]
FIT_HELP = (
    "fit.json, from `llmctl fit`, or the name of a recipe that has a shipped fit. Default: "
    "fit.json in this folder, else the shipped one, else for vLLM on a GPU laws that are computed "
    "from measured operators."
)
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout; notes go to stderr.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonOptions:
    """What every command has: its last option."""

    as_json: JsonOption = False


_traffic = partial(option, rich_help_panel="Requests and workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOptions(JsonOptions):
    """What several commands ask for, by one name, help and default. A command has the options that
    it names to `command_of`.
    """

    recipe: Path | None = None  # an argument, in the commands that have it
    fit: str | None = option(None, FIT_HELP, autocompletion=fits)
    plan: Path | None = option(
        None, "The server's plan: lengths are scaled to its model, metrics predicted from it."
    )
    tuning: Path | None = option(
        None,
        "tuning.json, from `llmctl tune`: take the settings that it recommends, its workers, "
        "targets and seed.",
    )
    trace: str | None = option(
        None,
        "A trace file, or the name of a shipped trace; default: the recipe's, or chat-small.",
        autocompletion=traces,
    )
    sla: list[str] | None = option(
        None,
        "Set a latency target, like ttft_p99_s=2; repeatable.",
        metavar="KEY=SECONDS",
    )
    rate: float | None = _traffic(
        None, "Scale arrivals to this many requests per second; default: the trace's own rate."
    )
    load: float | None = _traffic(
        None,
        "Instead of a rate: this multiple of the highest rate at which the recipe's settings keep "
        "all limits.",
        min=0.01,
        max=100.0,
    )
    concurrency: int | None = _traffic(
        None,
        "A closed loop in place of a rate: this number of requests runs at once; when one ends, "
        "the next one of the trace starts.",
        min=1,
    )
    workers: int | None = _traffic(
        None,
        "The number of workers; default: the plan's or the tuning's, else the recipe's.",
        min=1,
        callback=limit_workers,
    )
    seed: int | None = _traffic(
        None,
        "Draw from this seed; default: the tuning's or the recipe's. The same seed gives the same "
        "figures.",
        min=0,
    )
    max_new_tokens: int | None = _traffic(
        None,
        "The limit of requests without one in the trace; default: the recipe's, or 4096 in "
        "unit-step.",
        min=1,
    )
    settings: list[str] | None = option(
        None,
        "Set a parameter of the policy, like slice_tokens=64; repeatable.",
        "--set",
        metavar="KEY=VALUE",
    )
    force: bool = option(
        False,
        "Go on although the fit or the plan is for another recipe, device, engine, version or "
        "model.",
    )


def open_recipe(path: Path) -> Recipe:
    """Read a recipe, and check its policy and its scaling rule. Raises InputError for one that does
    not exist, or has no such parameter, with the nearest name.
    """
    from toolkit.sched.policies import make_any

    recipe = load_recipe(path)
    try:
        make_any(recipe.policy.name, recipe.policy.parameters)
    except InputError as error:
        raise InputError(f"{path.name}: policy: {error.message}", error.hint) from None
    if recipe.scale is not None:
        from toolkit.scaling.rules import make_behaviour, make_rule

        chosen = recipe.scale.scaling
        try:
            make_rule(chosen.rule, chosen.parameters)
            make_behaviour(chosen.behaviour)
        except InputError as error:
            raise InputError(f"{path.name}: scale: {error.message}", error.hint) from None
    return recipe


def names_in(option: str, listed: str | None) -> list[str] | None:
    """Return the different names of a list with commas; None: the option is not given. Raises
    InputError for a list without names.
    """
    if listed is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))
    if not names:
        hint = "leave the option out for the default"
        raise InputError(f"{option} '{listed}': the list is empty", hint)
    return names


def numbers_in(option: str, listed: str | None, most: float, example: str) -> list[float]:
    """Return the numbers of a list with commas; none where the option is not given. Raises
    InputError for words that are no number above 0 and below `most`.
    """
    found = []
    for word in names_in(option, listed) or []:
        try:
            found.append(float(word))
        except ValueError:
            found.append(0.0)
        if not 0.0 < found[-1] < most:
            limit = "" if most == math.inf else f" and below {most:,.0f}"
            raise InputError(
                f"{option} {word}: not a number above 0{limit}", f"for example {example}"
            )
    return found


def refuse_useless(
    values: Mapping[str, float | str | Path | None], why: str, hint: str = ""
) -> None:
    """`InputError` for the first of these options that was given, since it has no effect; by
    default the hint is to leave it out.
    """
    for name, value in values.items():
        if value is not None:
            shown = f"{value:g}" if isinstance(value, float | int) else value
            if isinstance(value, Path):
                shown = value.name
            raise InputError(f"{name} {shown} changes nothing: {why}", hint or f"leave {name} out")


def parse_sla(targets: list[str] | None) -> dict[str, float]:
    """Parse the `key=seconds` words of --sla. `InputError` for a key that is not a target,
    and for a value that is not a positive number.
    """
    from toolkit.sched.policies.parameters import split, value

    sla = {}
    for key, text in (split(word, SLA_EXAMPLE) for word in targets or []):
        limit = value(text)
        if isinstance(limit, (bool, str)) or not 0 < limit < float("inf"):
            problem = "not a positive number of seconds"
        else:
            problem = sla_problem(key, limit)
        if problem:
            raise InputError(f"--sla {key}={text}: {problem}", f"for example {SLA_EXAMPLE}")
        sla[key] = float(limit)
    return sla
