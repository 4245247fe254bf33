"""The arguments and options that several commands share, so that they read and behave alike."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import completion

if TYPE_CHECKING:
    from toolkit.files.recipe import Recipe


SLA_EXAMPLE = "ttft_p99_s=2"


def resolve_recipe(recipe: Path | None) -> Path | None:
    """A recipe's file, from what an argument or an option was given: a path, or a name."""
    from toolkit.files.io import recipe_path

    return None if recipe is None else recipe_path(recipe)


def resolve_fit(fit: Path | None) -> Path | None:
    """A fit's file, from what an option was given: a path, or a name."""
    from toolkit.files.io import fit_path

    return None if fit is None else fit_path(fit)


def limit_workers(workers: int | None) -> int | None:
    """What an option --workers was given. `InputError` above what one scheduler may have."""
    from toolkit.errors import InputError
    from toolkit.files.recipe import MAX_WORKERS, MORE_WORKERS, WORKERS_LIMIT

    if workers is not None and workers > MAX_WORKERS:
        raise InputError(f"--workers {workers}: {WORKERS_LIMIT}", MORE_WORKERS)
    return workers


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE",
        callback=resolve_recipe,
        autocompletion=completion.recipes,
        help="A recipe's file, or the name of a shipped one.",
    ),
]
FIT_HELP = "fit.json, from `llmctl fit`, or the name of a recipe whose fit ships."
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout; notes go to stderr.")
]


def open_recipe(path: Path) -> Recipe:
    """A recipe, its policy checked against the registry. `InputError` naming what is right."""
    from toolkit.errors import InputError
    from toolkit.files.io import load_recipe
    from toolkit.sched.policies import make_any

    recipe = load_recipe(path)
    try:
        make_any(recipe.policy.name, recipe.policy.parameters)
    except InputError as error:
        raise InputError(f"{path.name}: policy: {error.message}", error.hint) from None
    return recipe


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A parameter of the policy, like slice_tokens=64; repeatable.",
    ),
]
SlaOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sla", metavar="KEY=SECONDS", help="A latency target, like ttft_p99_s=2; repeatable."
    ),
]


MaxErrorOption = Annotated[
    float | None,
    typer.Option(
        min=0.0, help="Exit code 4 where throughput or a mean latency is off by more percent."
    ),
]
ModelOption = Annotated[
    str | None, typer.Option(help="The model's name; default: the first that the server has.")
]
ApiKeyOption = Annotated[str, typer.Option(envvar="LLMCTL_API_KEY", help="The server's key.")]
ForeignOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Go on though the plan is of another device, engine, version or model."
    ),
]

BrokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-broken-limits",
        help="Go on though the settings are predicted to break limits; --force does, too.",
    ),
]


def parse_settings(settings: list[str] | None) -> dict[str, bool | int | float | str]:
    """`key=value` words as a dict: whole numbers, numbers, true and false, else text. `InputError`
    without a '='.
    """
    from toolkit.sched.policies.parameters import from_words

    return from_words(settings or [])


def parse_sla(targets: list[str] | None) -> dict[str, float]:
    """`key=seconds` words as targets. `InputError` for a key that is no target, or no positive
    number.
    """
    from toolkit.errors import InputError
    from toolkit.files.recipe import sla_problem
    from toolkit.sched.policies.parameters import split, value

    sla = {}
    for key, text in (split(word, SLA_EXAMPLE) for word in targets or []):
        limit = value(text)
        if isinstance(limit, (bool, str)) or not 0 < limit < float("inf"):
            raise InputError(
                f"--sla {key}={text}: not a positive number of seconds",
                f"for example {SLA_EXAMPLE}",
            )
        problem = sla_problem(key, limit)
        if problem:
            raise InputError(f"--sla {key}={text}: {problem}", f"for example {SLA_EXAMPLE}")
        sla[key] = float(limit)
    return sla
