"""`llmctl tune`: search the scheduler's policy and parameters on a trace, with the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import FIT_HELP, JsonOption, RecipeArgument, limit_workers, open_recipe, resolve_fit

if TYPE_CHECKING:
    from toolkit.cli.fleet import Fleet
    from toolkit.errors import LimitsBrokenError
    from toolkit.files.fit import Fit
    from toolkit.files.profile import Profile
    from toolkit.files.recipe import Recipe
    from toolkit.files.tuning import Tuning
    from toolkit.tuning.crew import Runner
    from toolkit.tuning.memo import Memory
    from toolkit.tuning.search import Settings

AUTO = "auto"
LONGEST_COUNT = 18  # digits; Python refuses to read thousands of them
ESTIMATE_AFTER = 10  # evaluations that are timed for the estimate
WORTH_SAYING_S = 10.0
MAX_JOBS = 1024


def _limit_jobs(jobs: int | None) -> int | None:
    """What --jobs was given. `InputError` for more processes than any machine has cores."""
    from toolkit.errors import InputError

    if jobs is not None and jobs > MAX_JOBS:
        hint = "leave it out for as many as there are cores"
        raise InputError(f"--jobs {jobs}: the limit is {MAX_JOBS:,}, since each is a process", hint)
    return jobs


PoliciesOption = Annotated[
    str | None,
    typer.Option(
        "--policies",
        metavar="NAME,...",
        autocompletion=completion.policies,
        help="Search these besides the recipe's own; 'all' (default): every one but the oracles; 'own': no other.",
    ),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", min=1, callback=_limit_jobs, help="Processes that simulate; default: all cores."),
]
WorkersOption = Annotated[
    str | None,
    typer.Option("--workers", metavar="N|auto", help="Workers; 'auto': the fewest that keep all limits."),
]
ExecutorOption = Annotated[
    str, typer.Option("--executor", metavar="local|ray", help="Where to simulate: here, or on a Ray cluster.")
]
RayOption = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="local|auto|HOST:PORT",
        help="With --executor ray: a new cluster, this machine's, or a head.",
    ),
]
StorageOption = Annotated[
    str,
    typer.Option(
        "--storage",
        metavar="URL",
        envvar="LLMCTL_STORAGE",
        show_default=False,
        help="Keep the trials in a database, sqlite:///FILE or postgresql://...; default: a file beside the result.",
    ),
]
DrawsOption = Annotated[
    int | None, typer.Option("--draws", min=0, help="Draws of the fitted laws for the verdict's interval; 0: none.")
]
WindowOption = Annotated[
    float | None,
    typer.Option("--window", min=0.1, help="Seconds of each window, where the trace allows it."),
]

ForceOption = Annotated[bool, typer.Option("--force", help="Tune with a fit that is of another or a changed recipe.")]


def command(
    recipe: RecipeArgument,
    fit: Annotated[Path, typer.Option(callback=resolve_fit, autocompletion=completion.fits, help=FIT_HELP)] = Path(
        "fit.json"
    ),
    trace: Annotated[
        str,
        typer.Option(
            autocompletion=completion.traces,
            help="A trace file, or the name of a shipped trace; default: the recipe's.",
            show_default=False,
        ),
    ] = "",
    out: Annotated[Path, typer.Option(help="Where to write the result.")] = Path("tuning.json"),
    policies: PoliciesOption = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials; default: the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed; default: the recipe's. Same seed, same bytes.")] = None,
    rate: Annotated[float | None, typer.Option(help="Scale arrivals to this many requests per second.")] = None,
    window: WindowOption = None,
    workers: WorkersOption = None,
    draws: DrawsOption = None,
    jobs: JobsOption = None,
    force: ForceOption = False,
    executor: ExecutorOption = "local",
    ray: RayOption = "auto",
    storage: StorageOption = "",
    as_json: JsonOption = False,
) -> None:
    """Search the scheduler's policy and parameters on windows of a trace, and judge the best on other windows.

    What is recommended is the best that the recipe's engine can run; beside it stand the best of all policies and what
    the recipes for other engines would give. Trial 0 is the recipe's own policy. What is found is a gain over it on
    windows that the search never saw, how sure it is, or the advice to keep it. An interrupted search goes on where it
    was; neither --jobs nor --executor changes anything but the time. Exit code 5 where what is recommended breaks a
    limit: the result is written and printed all the same.
    """
    from toolkit.cli.basis import note_basis, read_fit
    from toolkit.cli.output import emit, note, progress
    from toolkit.cli.trace_notes import note_trace
    from toolkit.cli.tuning_report import show
    from toolkit.files.fits import shipped_siblings
    from toolkit.files.io import check_writable, head, write_file
    from toolkit.traces.read import read_trace
    from toolkit.traces.shipped import trace_path
    from toolkit.tuning.memo import Remembering
    from toolkit.tuning.tune import Inputs, evaluations, settings_of, tune, tune_to_size
    from toolkit.tuning.workload import make_workload

    given = {"policies": _names(policies), "trials": trials, "seed": seed, "request_rate_rps": rate, "draws": draws}
    given["window_s"] = window
    fleet = _fleet_of(recipe, workers, force)
    if fleet:
        first = fleet.kinds[0]
        spec, fitted, others = first.recipe.model_copy(update={"workers": first.workers}), first.fit, fleet.others
    else:
        spec, fitted, others = open_recipe(recipe), read_fit(fit, recipe, force=force), []
    spec = _with_options(spec, given)
    settings = settings_of(spec, fitted, others)
    siblings = [] if others else shipped_siblings(spec)
    count = _count(workers)
    profile = None if others else _profile_of(fitted, fleet.inputs["fit"] if fleet else fit)
    traffic = trace_path(trace or spec.tune.trace)
    workload = make_workload(spec, fitted, read_trace(traffic)[0], others)
    if count:
        _refuse_several_servers(spec, count)
        spec = spec.model_copy(update={"workers": count})
    note_trace(workload.trace)
    check_writable(out)
    made_from = head((fleet.inputs if fleet else {"recipe": recipe, "fit": fit}) | {"trace": traffic})
    digests = "".join(source.sha256 for source in made_from["inputs"].values())
    fingerprint = f"{digests} {profile is not None} {made_from['tool_version']} {spec.model_dump_json()}"
    besides = "".join(sibling.model_dump_json() for sibling in siblings)
    fingerprint += f" {sha256(besides.encode()).hexdigest()}"
    search = tune_to_size if workers == AUTO else tune
    total = evaluations(settings, spec.tune.draws, siblings)
    _note_search(settings, total)
    memory = _memory(storage, Path(f"{out}.partial"), spec.name, fingerprint)
    with _runner(executor, ray, jobs) as (runner, at_once), progress("tuning", total) as advance:
        memo = Remembering(runner, memory)
        watch = Watch(advance, total, memo.remembered, at_once)
        result = search(Inputs(spec, fitted, workload, profile, tuple(others), tuple(siblings)), memo, made_from, watch)
    write_file(result, out)
    memory.forget()
    emit(as_json, result, lambda: show(result))
    if fleet:
        fleet.note_bases()
    else:
        note_basis(fitted, fit)
    note(f"wrote {out}")
    if not result.keeps_limits:
        raise _broken(result)


def _broken(result: Tuning) -> LimitsBrokenError:
    """What ends the command where the recommended settings break limits."""
    from toolkit.errors import LimitsBrokenError
    from toolkit.files.limits import breaks

    which = "the recipe's settings, which nothing beat," if result.keep_defaults else "the best settings"
    return LimitsBrokenError(
        f"held out, {which} {breaks(result.limits)}",
        "`render` and `serve` refuse this tuning without --allow-broken-limits",
    )


def _note_search(settings: Settings, total: int) -> None:
    """What is searched, and what it costs; seconds follow when the first simulations are timed."""
    from toolkit.cli.output import note

    count, served = len(settings.spaces), len(settings.served)
    policies = f"{count} policies, {served} of which this engine can run" if count > 1 else "the recipe's own policy"
    hint = "; --policies own searches the recipe's alone" if count > 1 else ""
    note(f"{settings.trials} trials of {policies}; about {total} simulations in all{hint}")
    if settings.trials < count:
        left = ", ".join(space.policy for space in settings.spaces[settings.trials :])
        note(f"warning: with {settings.trials} trials these are not tried: {left}")


def _fleet_of(source: Path, workers: str | None, force: bool) -> Fleet | None:
    """The fleet, where one was given; None for a recipe."""
    from toolkit.cli.fleet import open_fleet, refuse_workers
    from toolkit.files.fleet import is_fleet

    if not is_fleet(source):
        return None
    refuse_workers(workers)
    return open_fleet(source, force=force)


@contextmanager
def _runner(executor: str, ray: str, jobs: int | None) -> Iterator[tuple[Runner, int]]:
    """Who simulates until the block ends, and how much at once."""
    from toolkit.errors import InputError, nearest
    from toolkit.tuning.crew import Alone, Crew, Spread, cores

    if executor == "local":
        jobs = jobs or cores()
        with Crew(jobs) as crew:
            yield (crew if jobs > 1 else Alone()), jobs
    elif executor == "ray":
        from toolkit.cli.output import note
        from toolkit.cluster.connect import joined
        from toolkit.cluster.tasks import processors

        with joined(ray, jobs or cores()) as cluster:
            jobs = jobs or processors()
            note(f"on the Ray cluster at {cluster.address}: {jobs} processors of {cluster.nodes} machines")
            yield Spread(jobs), jobs
    else:
        raise InputError(f"--executor {executor}: there is none of that name", nearest(executor, ("local", "ray")))


def _memory(storage: str, beside: Path, name: str, fingerprint: str) -> Memory:
    """Where evaluations are kept."""
    import os

    from toolkit.tuning.memo import JournalFile

    if not storage:
        return JournalFile(beside, fingerprint)
    from toolkit.tuning.storage import Studies

    os.environ.pop("LLMCTL_STORAGE", None)  # processes that simulate need no password
    return Studies(storage, name, fingerprint)


class Watch:
    """Moves the progress bar, and says after a few evaluations how long all of them will take."""

    def __init__(self, advance: Callable[..., None], total: int, remembered: int, jobs: int) -> None:
        self._advance, self._total, self._remembered, self._jobs = advance, total, remembered, jobs
        self._done = 0
        self._began_s = 0.0

    def __call__(self, best: float) -> None:
        from toolkit.cli.output import note, number, seconds

        self._done += 1
        self._advance(text=f"best {number(best)} good requests/s" if best else "")
        timed = self._done - self._remembered - self._jobs  # the first of each process pays for its start
        if timed == 0:
            self._began_s = time.monotonic()
        elif timed == ESTIMATE_AFTER:
            left_s = (time.monotonic() - self._began_s) / timed * (self._total - self._done)
            if left_s > WORTH_SAYING_S:
                note(f"about {seconds(left_s)} for {self._total - self._done} more simulations, {self._jobs} at a time")


def _with_options(recipe: Recipe, given: Mapping[str, object]) -> Recipe:
    changed = {key: value for key, value in given.items() if value is not None}
    return recipe.model_copy(update={"tune": recipe.tune.model_copy(update=changed)})


def _names(policies: str | None) -> list[str] | None:
    return None if policies is None else [name.strip() for name in policies.split(",") if name.strip()]


def _count(workers: str | None) -> int | None:
    """The number of workers that was asked for; None for the recipe's, and for 'auto'."""
    from toolkit.errors import InputError

    if workers is None or workers == AUTO:
        return None
    if not workers.isdecimal() or len(workers) > LONGEST_COUNT or not int(workers):
        raise InputError(f"--workers {workers}: it is a whole number from 1, or '{AUTO}'")
    return limit_workers(int(workers))


def _refuse_several_servers(recipe: Recipe, count: int) -> None:
    from toolkit.errors import InputError
    from toolkit.files.fleet import SERVERS

    if recipe.engine.name in SERVERS and count > 1:
        raise InputError(
            f"--workers {count}: engine '{recipe.engine.name}' is a server, which is one worker",
            "tune one server for its share of the traffic with --rate; --workers auto says how much one can bear",
        )


def _profile_of(fitted: Fit, path: Path) -> Profile | None:
    """The profile beside the fit, where it is still the one that the fit was made from."""
    from toolkit.errors import InputError
    from toolkit.files.io import read_file
    from toolkit.files.profile import Profile
    from toolkit.files.provenance import digest

    made_from = fitted.inputs.get("profile")
    beside = path.parent / made_from.name if made_from else path
    if made_from is None or not beside.exists():
        return None
    try:
        return read_file(Profile, beside) if digest(beside).sha256 == made_from.sha256 else None
    except InputError:
        return None
