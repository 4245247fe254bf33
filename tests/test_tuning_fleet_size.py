"""The cheapest servers of a fleet: the order of counts, what the laws exclude, and the answer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
from commands import llmctl
from hypothesis import given, settings
from hypothesis import strategies as st
from said import says
from test_fleet_files import VLLM, paged, write_fleet, write_server

from toolkit.cli.basis import open_fleet, plan_from
from toolkit.cli.tune_output import show
from toolkit.errors import InputError, LimitsBrokenError
from toolkit.files.fleet import CountRange, fleet_sources, sized
from toolkit.files.io import read_file
from toolkit.files.plan import Kind
from toolkit.files.tuning import SizedKind, Sizing, SizingRow, Tuning
from toolkit.report.verdict import verdict
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.world import world_of
from toolkit.traces.generate import Arrivals, generate, parse_lengths
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import CandidateLimits, Evaluation, EvaluationSetup, Task
from toolkit.tuning.executor import InProcessRunner, collect
from toolkit.tuning.fleet_size import (
    Counts,
    FleetCounts,
    JudgedSettings,
    LeastWork,
    Mixes,
    at_counts,
    tune_fleet_to_size,
)
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.workload import make_workload

SLA = {"ttft_p90_s": 0.4, "mtpot_p90_s": 0.4}
BUSY: dict[str, Any] = {"request_rate_rps": 240.0}  # more than one fast server serves
TUNE = {
    "trials": 4,
    "draws": 0,
    "windows": 1,
    "held_out_windows": 1,
    "request_rate_rps": 60.0,
    "routers": ["by-law"],
}
SMALL_RANGE = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
    lambda pair: CountRange(min(pair), max(pair))
)
PRICE = st.integers(1, 12).map(lambda price: Fraction(price, 4))
LIMITS = CandidateLimits(max_oom_percent=1.0)


def kind(
    name: str, speed: float, *, usd: float | None = None, capacity: int = 4096, **changes: Any
) -> Kind:
    hardware = {"device": "cpu", "name": "none", "usd_per_hour": usd}
    spec = {"engine": {"name": "vllm"}, "policy": VLLM, "hardware": hardware, "workers": 1}
    recipe = samples.recipe(name=name, **(spec | changes))
    return Kind(recipe=recipe, fit=paged(speed, capacity), workers=1)


def inputs(usd: tuple[float | None, float | None], **changes: Any) -> Inputs:
    first = kind("fast", 1.0, usd=usd[0], **({"sla": SLA, "tune": TUNE} | changes))
    slow = kind("slow", 0.5, usd=usd[1])
    trace = generate(
        Arrivals(60.0), 24.0, parse_lengths("uniform:10:60"), parse_lengths("uniform:5:40"), 0
    )
    workload = make_workload(first.recipe, first.fit, trace, [slow])
    return Inputs(first.recipe, first.fit, workload, None, (slow,))


def sized_by(made: Inputs, ranges: list[CountRange], runner: Any) -> Tuning:
    return tune_fleet_to_size(
        made, runner, samples.HEAD, lambda best: None, ranges=ranges, expect=lambda more: None
    )


def size(
    usd: tuple[float | None, float | None],
    runner: Any = None,
    most: int = 256,
    **changes: Any,
) -> Tuning:
    ranges = [CountRange(1, most), CountRange(0, most)]
    run = runner or InProcessRunner()
    return sized_by(inputs(usd, **changes), ranges, run)


# The order


def every(mixes: Mixes) -> list[Counts]:
    spans = [range(each.least, each.most + 1) for each in mixes.ranges]
    return [counts for counts in product(*spans) if 0 < sum(counts) <= mixes.most]


@pytest.mark.slow
@given(st.lists(st.tuples(SMALL_RANGE, PRICE), min_size=1, max_size=4), st.integers(1, 9))
def test_counts_come_by_cost_each_once(kinds: list[tuple[CountRange, Fraction]], most: int) -> None:
    ranges, prices = zip(*kinds, strict=True)
    mixes = Mixes(ranges, prices, most)
    # the fewest of all kinds may be none: the search begins at one server of the first kind
    if not any(each.least for each in ranges):
        ranges = (CountRange(1, max(1, ranges[0].most)), *ranges[1:])
        mixes = replace(mixes, ranges=ranges)
    expected = sorted(every(mixes), key=mixes.rank)
    assert list(mixes.in_order()) == expected
    for end in expected[:: max(1, len(expected) // 5)]:
        assert list(mixes.in_order(end)) == expected[: expected.index(end)]


def test_equal_costs_come_with_fewer_servers_and_then_more_of_the_first_kind() -> None:
    ranges = (CountRange(1, 9), CountRange(0, 9))
    priced = Mixes(ranges, (Fraction("0.3"), Fraction("0.1")))
    found = list(priced.in_order((3, 0)))
    assert found.index((2, 0)) < found.index((1, 3))
    free = Mixes(ranges, (Fraction(1), Fraction(1)))
    assert list(free.in_order((3, 1)))[:6] == [(1, 0), (2, 0), (1, 1), (3, 0), (2, 1), (1, 2)]


def test_near_counts_differ_by_one_server_or_by_one_of_each_of_two_kinds() -> None:
    mixes = Mixes((CountRange(1, 9), CountRange(0, 9)), (Fraction(3), Fraction(1)))
    assert mixes.near((2, 1)) == [(1, 1), (1, 2), (2, 0)]
    assert mixes.near((1, 0)) == []


class Allowing:
    """Excludes the given counts."""

    def __init__(self, excluded: set[Counts]) -> None:
        self._excluded = excluded

    def allows(self, counts: Counts) -> bool:
        return counts not in self._excluded


class Asked(dict[Any, Any]):
    """Rows of a table that notes which were asked for."""

    def __init__(self, rows: dict[Any, Any]) -> None:
        super().__init__(rows)
        self.counts: set[Counts] = set()

    def __getitem__(self, key: Any) -> Any:
        self.counts.add(key[1])
        return super().__getitem__(key)


def known(
    mixes: Mixes, good: set[Counts], excluded: set[Counts]
) -> tuple[FleetCounts, JudgedSettings]:
    """Counts that need no simulation."""
    rows = Asked(
        {
            ("recipe", counts): SizingRow.model_construct(feasible=counts in good)
            for counts in every(mixes)
        }
    )
    evaluate = partial(collect, InProcessRunner())
    made = FleetCounts(inputs((None, None)), mixes, evaluate, lambda more: None, rows)
    return made, JudgedSettings("recipe", None, Allowing(excluded))  # type: ignore[arg-type]


GRID = Mixes(
    (CountRange(1, 4), CountRange(0, 3), CountRange(0, 2)), (Fraction(4), Fraction(3), Fraction(1))
)
WIDE = Mixes((CountRange(1, 20), CountRange(0, 20)), (Fraction(7, 2), Fraction(1)))


@pytest.mark.slow
@given(st.sets(st.sampled_from(every(GRID))), st.sets(st.sampled_from(every(GRID))))
def test_the_first_counts_are_the_cheapest_of_any_that_keep(
    good: set[Counts], excluded: set[Counts]
) -> None:
    sizes, judged = known(GRID, good, excluded)
    possible = [counts for counts in good if counts not in excluded]
    assert sizes.first(judged, (1, 1, 1)) == min(possible, key=GRID.rank, default=None)
    assert isinstance(sizes.rows, Asked)
    assert not sizes.rows.counts & excluded


@pytest.mark.slow
@given(st.sets(st.sampled_from(every(WIDE)), max_size=40), st.integers(1, 20))
@settings(max_examples=40)
def test_in_a_wide_range_too_where_one_kind_alone_keeps(good: set[Counts], enough: int) -> None:
    alone = {(count, 0) for count in range(enough, 21)}
    sizes, judged = known(WIDE, good | alone, set())
    assert sizes.first(judged, (1, 2)) == min(good | alone, key=WIDE.rank)


def test_where_the_first_counts_fail_a_wide_range_is_not_tried_whole() -> None:
    sizes, judged = known(WIDE, set(), set())
    assert sizes.first(judged, (1, 2)) is None
    assert isinstance(sizes.rows, Asked)
    assert len(sizes.rows.counts) < 25


# What the laws exclude


def setup_of(
    kinds: Sequence[Kind],
    windows: list[Trace],
    sla: dict[str, float],
    limits: CandidateLimits = LIMITS,
) -> EvaluationSetup:
    return EvaluationSetup(world_of(kinds, max_new_tokens=64), windows, sla, limits=limits)


@st.composite
def busy_windows(draw: st.DrawFn) -> list[Trace]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        count = draw(st.integers(5, 60))
        seed = draw(st.integers(0, 99))
        rng = np.random.default_rng(seed)
        seconds = draw(st.sampled_from([0.01, 0.3, 2.0]))
        longest = draw(st.sampled_from([8, 100, 300]))
        found.append(
            Trace(
                np.sort(rng.uniform(0, seconds, count)),
                rng.integers(1, longest, count),
                rng.integers(1, draw(st.sampled_from([2, 64])), count),
                np.full(count, 64),
            )
        )
    return found


@pytest.mark.slow
@given(
    windows=busy_windows(),
    counts=st.tuples(st.integers(1, 3), st.integers(0, 3)),
    loose=st.sampled_from([0.3, 0.6, 1.0, 1.5]),
    names=st.sampled_from([("e2e_p90_s",), ("ttft_p99_s", "tpot_p90_s"), ("e2e_max_s",), ()]),
    rows=st.sampled_from([1, 4, 32]),
    capacity=st.sampled_from([416, 4096]),
    promised=st.sampled_from([None, 80.0]),
)
def test_no_counts_that_keep_the_limits_are_excluded(
    windows, counts, loose, names, rows, capacity, promised
):
    """The targets are set by what was simulated, so that many just keep them."""
    kinds = [kind("fast", 1.0, capacity=capacity), kind("slow", 0.4, capacity=capacity)]
    flags = VllmPolicy(max_num_seqs=rows, max_num_batched_tokens=128)
    used = [
        one.model_copy(update={"workers": n}) for one, n in zip(kinds, counts, strict=True) if n
    ]
    own = {"max_num_seqs": rows, "max_num_batched_tokens": 128}
    task = Task(setup_of(used, windows, dict.fromkeys(names, 1e9)), "vllm", own)
    targets = {name: loose * 1e9 * ratio + 1e-6 for name, ratio in task.run().ratios.items()}
    limits = replace(LIMITS, min_attainment_percent=promised)
    done = replace(task, setup=setup_of(used, windows, targets)).run()
    work = LeastWork(setup_of(kinds, windows, targets, limits), flags)
    assert work.allows(counts) or not done.feasible(limits)


def backlog() -> Trace:
    count = 400
    return Trace(
        np.arange(count) / 400.0, np.full(count, 100), np.full(count, 30), np.full(count, 30)
    )


@pytest.mark.slow
def test_counts_that_cannot_do_the_work_are_excluded_close_to_where_they_begin_to_keep() -> None:
    kinds = [kind("fast", 1.0), kind("slow", 0.5)]
    sla = {"e2e_p90_s": 1.5}
    work = LeastWork(setup_of(kinds, [backlog()], sla), VllmPolicy(**VLLM["parameters"]))
    least = next(n for n in range(1, 99) if work.allows((n, 0)))
    both = next(n for n in range(1, 99) if work.allows((1, n)))
    assert 2 * (least - 1) - 1 <= both <= 2 * (least - 1) + 1

    def keeps(count: int) -> bool:
        alone = [kinds[0].model_copy(update={"workers": count})]
        task = Task(setup_of(alone, [backlog()], sla), "vllm", VLLM["parameters"])
        return task.run().feasible(LIMITS)

    needed = next(n for n in range(1, 99) if keeps(n))
    assert 1 < least <= needed <= 2 * least


def test_a_closed_loop_and_means_exclude_nothing() -> None:
    kinds = [kind("fast", 1.0), kind("slow", 0.5)]
    for sla in ({"e2e_mean_s": 1e-3}, {"ttft_p99_s": 1e-3}):
        work = LeastWork(setup_of(kinds, [backlog()], sla), VllmPolicy())
        assert work.allows((1, 0))


# The answer


class Watching(InProcessRunner):
    """Notes which machine each label stands for; an interrupted search finds results by labels."""

    def __init__(self) -> None:
        self.machines: dict[str, object] = {}

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for task in tasks:
            kinds = [(one.workers, one.engine().steps.base_s) for one in task.setup.world.kinds]
            assert self.machines.setdefault(task.setup.label, kinds) == kinds
        return super().run(tasks)


@pytest.fixture(scope="module")
def priced() -> Tuning:
    return size((4.0, 1.0), Watching(), tune=TUNE | BUSY)


@pytest.mark.slow
def test_the_cheapest_counts_are_found_and_shown(
    priced: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    sizing = priced.sizing
    assert sizing is not None
    counts = {one.recipe: one.workers for one in sizing.kinds}
    assert sum(counts.values()) == sizing.workers == priced.workers
    usd = 4.0 * counts["fast"] + 1.0 * counts["slow"]
    assert priced.cost is not None
    assert priced.cost.usd_per_hour == usd
    rows = {tuple(row.counts): row for row in sizing.rows if row.settings == sizing.settings}
    assert rows[counts["fast"], counts["slow"]].feasible
    cheaper = [row for (f, s), row in rows.items() if (4 * f + s, f + s) < (usd, sizing.workers)]
    assert cheaper or sizing.excluded
    assert not any(row.feasible for row in cheaper)
    for one, more in zip(sizing.kinds, ((1, 0), (0, 1)), strict=True):
        grown = counts["fast"] + more[0], counts["slow"] + more[1]
        assert rows[grown].feasible == one.one_more_keeps
    line = (
        f"servers needed: {counts['fast']} of fast, {counts['slow']} of slow, {usd:g} USD an hour"
    )
    assert verdict(priced)[0].startswith(("warning", line))
    show(priced)
    out = " ".join(capsys.readouterr().out.split())
    assert line in out
    assert f"{sizing.excluded} cannot do the work by the laws" in out
    assert f"{counts['fast']} + {counts['slow']}" in out


@pytest.mark.slow
def test_prices_decide_and_without_them_the_number_of_servers(priced: Tuning) -> None:
    free, dear = (size(usd, tune=TUNE | BUSY) for usd in ((None, None), (4.0, 40.0)))
    found = [
        [kind.workers for kind in one.sizing.kinds] if one.sizing else []
        for one in (priced, free, dear)
    ]
    assert all(found)
    assert sum(found[1]) <= sum(found[0])
    assert found[2][1] == 0
    assert free.cost is None
    assert "no fewer servers" in " ".join(verdict(free))


@pytest.mark.slow
def test_one_more_of_a_slow_kind_may_break_what_a_fast_one_keeps() -> None:
    """So nothing may be inferred from some counts for larger ones."""
    made = inputs((None, None))
    windows = [*made.workload.windows.search]
    alone = at_counts(made, (3, 0)).setup("x", windows)
    done = Task(alone, "vllm", VLLM["parameters"]).run()
    sla = {"ttft_p90_s": 1.05 * done.ratios["ttft_p90_s"] * SLA["ttft_p90_s"]}
    both = at_counts(made, (3, 1)).setup("y", windows)
    kept = [
        Task(replace(each, sla=sla), "vllm", VLLM["parameters"]).run().feasible(LIMITS)
        for each in (alone, both)
    ]
    assert kept == [True, False]


# What is refused


@pytest.mark.parametrize(
    ("usd", "changes", "named"),
    [
        ((None, None), {"sla": {}}, ("--workers auto", "targets")),
        ((4.0, None), {}, ("'slow'", "hardware.usd_per_hour", "'fast'")),
    ],
)
def test_what_cannot_be_sized_is_named(
    usd: tuple[float | None, float | None], changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as caught:
        size(usd, **changes)
    assert says(caught.value.message, *named)


def test_too_many_servers_at_least_are_refused() -> None:
    made = inputs((None, None))
    ranges = [CountRange(200, 300), CountRange(57, 300)]
    with pytest.raises(InputError, match=r"257.*--workers"):
        sized_by(made, ranges, InProcessRunner())


@pytest.mark.slow
def test_the_limit_that_no_counts_keep_is_named() -> None:
    with pytest.raises(LimitsBrokenError) as caught:
        size((None, None), most=2, sla={"ttft_p50_s": 1e-4})
    assert says(caught.value.message, "2 of fast", "2 of slow")
    with pytest.raises(LimitsBrokenError) as caught:
        size((None, None), most=2, sla={"e2e_p90_s": 1e-3}, tune=TUNE | {"request_rate_rps": 6e3})
    assert says(caught.value.hint, "sla", "--rate", "max_workers")


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A fleet file of a fast and a slow server, with prices."""
    tune = TUNE | {"windows": 1, "held_out_windows": 1}
    for name, speed, usd in (("fast", 1.0, 4.0), ("slow", 0.5, 1.0)):
        hardware = {"device": "cpu", "name": "none", "usd_per_hour": usd}
        write_server(tmp_path, name, speed, sla=SLA, tune=tune, hardware=hardware)
    return write_fleet(tmp_path, ("fast", 1), ("slow", 2))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("workers: 1}", "workers: 1, min_workers: 0}", ("fleet[0].min_workers: 0",)),
        ("workers: 2}", "min_workers: 3, max_workers: 2}", ("min_workers: 3", "max_workers", "2")),
        ("workers: 2}", "max_workers: 0}", ("fleet[1].max_workers: 0",)),
    ],
)
def test_wrong_ranges_are_named(servers: Path, old: str, new: str, named: tuple[str, ...]) -> None:
    servers.write_text(servers.read_text().replace(old, new))
    with pytest.raises(InputError) as caught:
        fleet_sources(servers)
    assert says(caught.value.message, "fleet.yaml", *named)


@pytest.mark.slow
def test_a_range_is_the_files_and_members_of_one_kind_share_it(servers: Path) -> None:
    assert open_fleet(servers).ranges == [CountRange(1, 1024), CountRange(0, 1024)]
    text = servers.read_text().replace("workers: 1}", "workers: 1, max_workers: 4}")
    again = "  - {recipe: fast.yaml, fit: fast.fit.json, min_workers: 2, max_workers: 3}\n"
    servers.write_text(text + again)
    assert open_fleet(servers).ranges == [CountRange(2, 7), CountRange(0, 1024)]


def test_a_number_of_workers_is_refused_for_a_fleet_of_servers(
    servers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(servers.parent)
    assert llmctl("tune", "fleet.yaml", "--workers", "3") != 0
    assert "--workers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("short_chat")
def test_a_plan_has_the_counts_that_tune_found(
    servers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(servers.parent)
    words = ["--workers", "auto", "--trace", "chat-small", "--rate", "60", "--jobs", "1"]
    assert llmctl("tune", "fleet.yaml", *words) in (0, 5)
    tuned = read_file(Tuning, "tuning.json")
    assert tuned.sizing is not None
    counts = {one.recipe: one.workers for one in tuned.sizing.kinds}
    render = ["render", "fleet.yaml", "--tuning", "tuning.json", "--allow-broken-limits"]
    assert llmctl(*render) == 0
    plan = json.loads(Path("plan.json").read_text())
    made, _ = plan_from(servers, None, Path("tuning.json"))
    assert {one.recipe.name: one.workers for one in made.kinds} == {
        name: count for name, count in counts.items() if count
    }
    assert plan["workers"] == tuned.sizing.workers
    assert "cheapest" in plan["explained"]["workers"]["source"]
    assert llmctl("report", "plan.json") == 0
    page = Path("report.html").read_text()
    assert f"servers needed: {counts['fast']} of fast, {counts['slow']} of slow" in page
    capsys.readouterr()


@pytest.mark.slow
def test_kinds_of_which_none_is_needed_are_left_out_of_the_plan(servers: Path) -> None:
    fleet = open_fleet(servers)
    tuned = Tuning.model_construct(sizing=size_of({"fast": 3, "slow": 0}))
    [first] = sized(fleet.kinds, tuned)
    assert (first.recipe.name, first.workers) == ("fast", 3)
    assert [one.workers for one in sized(fleet.kinds, None)] == [1, 2]
    other = Tuning.model_construct(sizing=size_of({"fast": 3, "other": 1}))
    with pytest.raises(InputError, match=r"fast, other"):
        sized(fleet.kinds, other)


def size_of(counts: dict[str, int]) -> Any:
    """A sizing with these counts."""

    kinds = [
        SizedKind(recipe=name, workers=count, usd_per_hour=None, one_more_keeps=None)
        for name, count in counts.items()
    ]
    workers = sum(counts.values())
    return Sizing(workers=workers, kinds=kinds, settings="recipe", one_more_keeps=None, rows=[])
