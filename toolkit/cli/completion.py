"""Names and files that the shell completes. Imports no more than the names need.

Each function takes the start of a word and returns the words that begin with it. Where there is no
function the shell completes files by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

UNIT_STEP = "unit-step"
RENDERED = ("local", "systemd", "compose", "kubernetes", "kuberay", "ray", "vllm", "sglang")
SERVED = ("local", "ray", "systemd", "compose")


def recipes(incomplete: str) -> list[str]:
    """Shipped recipes, and YAML files of the current folder."""
    from toolkit.files.shipped import shipped_recipes

    return _words(incomplete, (path.stem for path in shipped_recipes().glob("*.yaml")), "*.yaml")


def recipes_and_plans(incomplete: str) -> list[str]:
    """The same and JSON files, such as plans."""
    return sorted({*recipes(incomplete), *_words(incomplete, (), "*.json")})


def fits(incomplete: str) -> list[str]:
    """Recipes with a shipped fit, and JSON files of the current folder."""
    from toolkit.files.shipped import shipped_profiles

    return _words(
        incomplete, (path.parent.name for path in shipped_profiles().glob("*/fit.json")), "*.json"
    )


def fits_and_clock(incomplete: str) -> list[str]:
    """The same and `unit-step`, the clock that counts steps, for simulations."""
    return [*fits(incomplete), *_words(incomplete, [UNIT_STEP])]


def traces(incomplete: str) -> list[str]:
    """Shipped traces, and the traces of the current folder."""
    import toolkit

    shipped = (Path(toolkit.__file__).parent / "traces" / "data").glob("*.jsonl")
    return _words(incomplete, (path.stem for path in shipped), "*.jsonl", "*.csv")


def policy(incomplete: str) -> list[str]:
    """The names of policies."""
    from toolkit.sched.catalogue import ABOUT

    return _words(incomplete, ABOUT)


def router(incomplete: str) -> list[str]:
    """The names of routers of replicas."""
    from toolkit.routing.routers import ROUTERS

    return _words(incomplete, ROUTERS)


def policies(incomplete: str) -> list[str]:
    """The same after the last comma, for options that take several."""
    before, comma, last = incomplete.rpartition(",")
    named = before.split(",")
    return [f"{before}{comma}{name}" for name in policy(last) if name not in named]


def rendered_targets(incomplete: str) -> list[str]:
    """The targets of `render`."""
    return _words(incomplete, RENDERED)


def served_targets(incomplete: str) -> list[str]:
    """The targets of `serve`."""
    return _words(incomplete, SERVED)


def _words(incomplete: str, names: Iterable[str], *patterns: str) -> list[str]:
    here = [path.name for pattern in patterns for path in Path().glob(pattern)]
    return sorted({word for word in [*names, *here] if word.startswith(incomplete)})
