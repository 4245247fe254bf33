"""A real vLLM that keeps itself tuned while its traffic changes, beside fixed settings.

    python -m benchmarks.serving.kept_live plan.json --vllm-python PYTHON [--part 80] [--every 8]
        [--block 4] [--watch 24] [--load 0.8] [--seed 0] [--work FOLDER]

Sixteen minutes. One server (`llmctl serve --live`) gets the same traffic four times: three parts of
80 seconds, short chats, long documents and bursts of chats. The second time it keeps itself tuned,
as with `--keep-tuned --keep-apply`, and begins with the plan's settings. Before and after, it has
the plan's settings throughout: two runs, so that a drift of the machine shows. The last time it has
in each part the settings that are best of a grid, as simulated by the plan's fit. The better of
these, and of the mean of the fixed settings' runs, is the best that is known. Goodput is the share
of a part's requests that keep all targets.

Each part's rate is `--load` of the highest at which those best settings still serve 95 % of the
requests within the targets, by the fit. Give less where the machine is slower than when it was
fitted. Needs an otherwise idle machine. FOLDER gets the log of passes and vLLM's output.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.common.command import add_vllm, ended, make_parser
from benchmarks.common.results_file import keep
from benchmarks.serving.kept_tuned import joined
from toolkit.backends import ServerOrder
from toolkit.backends.vllm.backend import command_of, live_bounds
from toolkit.backends.vllm.command import vllm_server
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.bench.client import LoadSpec, run_whole, served
from toolkit.bench.session import RequestSettings, prepare_replay, unused_seed
from toolkit.endpoints.settings import SettingsClient
from toolkit.endpoints.target import Target, find_target
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.live.keep import KeepRules
from toolkit.live.kept import OWNER, KeeperProcess, KeepOrder
from toolkit.live.space import ROWS, THRESHOLD, TOKENS, Settings, policy_of
from toolkit.metrics import meets_sla
from toolkit.serve.server import Ending
from toolkit.sim.api import simulate
from toolkit.sim.world import World, world_of
from toolkit.traces.types import Trace

KEY = "of this benchmark"
SERVED = 0.95  # of the requests, by the best settings, at the highest rate
KINDS = ("chats", "documents", "bursts")
SHARES = {"chats": (0.08, 0.1), "documents": (0.55, 0.05), "bursts": (0.12, 0.08)}  # of the context
PERIOD_S = 20.0  # of bursts: three times the rate in a third of it
SETTLES = 0.15  # of each part's requests, before the first replay
LEAST_RPS = 0.25  # that is looked for
MOST_RPS = 500.0
HALVINGS = 3
START_S = 10.0  # until the keeper's process has imported what it needs


def part(kind: str, seconds: float, rate: float, context: int, seed: int) -> Trace:
    """Requests of one part, with mean lengths as shares of the model's context."""
    rng = np.random.default_rng(seed)
    count = int(rate * seconds)
    at = np.sort(rng.uniform(0.0, seconds, count))
    if kind == "bursts":
        at = np.floor(at / PERIOD_S) * PERIOD_S + at % PERIOD_S / 3.0
    lengths = [
        np.clip(rng.gamma(3.0, share * context / 3.0, count), 2, context // 2 - 1).astype(np.int64)
        for share in SHARES[kind]
    ]
    return Trace(at, lengths[0], lengths[1], lengths[1])


def grid_of(bounds: Mapping[str, tuple[float, float]]) -> list[Settings]:
    """Settings that are compared in hindsight, within the server's bounds."""
    values: dict[str, list[int]] = {}
    for name in (ROWS, TOKENS):
        low, high = bounds[name]
        places = np.geomspace(max(low, 8.0), high, 4)
        values[name] = [round(one) for one in places]
    values[THRESHOLD] = [0, 64]
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


@dataclass(frozen=True)
class Part:
    """A part's traffic, and the settings that are best for it by the fit."""

    kind: str
    trace: Trace
    best: Settings
    predicted: float


def fitted_part(
    kind: str, seconds: float, load: float, plan: Plan, world: World, seed: int
) -> Part:
    """A part at `load` of the highest rate that the best settings serve."""
    sla = plan.recipe.sla
    context = plan.recipe.model.max_model_len
    grid = grid_of(live_bounds(plan))

    def share_of(settings: Settings, trace: Trace) -> float:
        policy = policy_of(plan.policy.parameters, settings)
        return float(meets_sla(simulate(trace, policy, world).served, sla).mean())

    def is_served(rate: float) -> bool:
        trace = part(kind, seconds, rate, context, seed)
        return any(share_of(settings, trace) >= SERVED for settings in grid)

    low = LEAST_RPS
    high = 2.0 * low
    if not is_served(low):
        raise InputError(
            f"{kind}: no settings keep the targets at {low:g} requests/s by the plan's fit",
            "profile this machine while nothing else runs, or set other targets in the recipe",
        )
    while is_served(high) and high < MOST_RPS:
        low = high
        high = 2.0 * low
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if is_served(middle):
            low = middle
        else:
            high = middle
    trace = part(kind, seconds, load * low, context, seed)
    shares = [share_of(settings, trace) for settings in grid]
    at = int(np.argmax(shares))
    return Part(kind, trace, grid[at], shares[at])


@dataclass
class Contest:
    """The server, and the traffic that it gets once for each contender."""

    target: Target
    load: LoadSpec
    control: SettingsClient
    parts: Sequence[Part]
    part_s: float
    sla: Mapping[str, float]

    def replay(self, trace: Trace) -> np.ndarray:
        """Which requests kept all targets."""
        load = replace(self.load, seed=unused_seed(), timeout_s=self.part_s)
        whole = run_whole(self.target, trace, load, lambda: None)
        good: np.ndarray = meets_sla(served(whole.samples), self.sla)
        return good

    def whole(self) -> list[float]:
        """All parts without a pause, with whatever settings there are."""
        trace = joined([one.trace for one in self.parts], self.part_s)
        good = self.replay(trace)
        of_part = (trace.arrival_s // self.part_s).astype(int)
        return [float(good[of_part == k].mean()) for k in range(len(self.parts))]

    def at_best(self) -> list[float]:
        """Each part alone, with its best settings."""
        found = []
        for one in self.parts:
            self.control.set(one.best, f"best of {one.kind}")
            found.append(float(self.replay(one.trace).mean()))
        return found


def say(line: str) -> None:
    """In the keeper's process."""
    print(f"  {time.strftime('%H:%M:%S')} {line}", flush=True)


def run(given: argparse.Namespace) -> None:
    """Serve, replay four times, print."""
    plan = read_file(Plan, given.plan)
    given.work.mkdir(parents=True, exist_ok=True)
    passes = given.work / "passes.jsonl"
    passes.unlink(missing_ok=True)
    recipe = plan.recipe
    world = world_of(plan.kinds, max_new_tokens=recipe.serve.max_new_tokens)
    begun_s = time.monotonic()
    parts = [
        fitted_part(kind, given.part, given.load, plan, world, given.seed + k)
        for k, kind in enumerate(KINDS)
    ]
    for one in parts:
        words = ", ".join(f"{name}={value}" for name, value in one.best.items())
        count = len(one.trace)
        print(
            f"{one.kind}: {count} requests, {count / given.part:.2f} requests/s; best by the fit: "
            f"{words}, {100 * one.predicted:.0f} % predicted"
        )
    print(f"{time.monotonic() - begun_s:.0f} s for that; now about {12 * given.part / 60:.0f} min")
    bounds = {
        name: span for name, span in live_bounds(plan).items() if name in (ROWS, TOKENS, THRESHOLD)
    }
    rules = KeepRules(
        bounds,
        block_s=given.block,
        watch_s=given.watch,
        ahead_s=given.part,
        requests_min=given.requests_min,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        (given.work / "vllm.log").open("w", encoding="utf-8") as output,
        redirect_stderr(output),
    ):
        command = ServerOrder(
            plan,
            recipe.name,
            "127.0.0.1",
            0,
            Ending(timeout_s=1.0),
            pass_log=passes,
            control_key=KEY,
        )
        with vllm_server(command_of(command, Path(folder)), quiet=False) as server:
            target = find_target(server.url)
            control = SettingsClient(server.url, KEY, OWNER)
            start = {name: control.get().values[name] for name in bounds}
            asked = RequestSettings(None, seed=unused_seed(), loop="open", scaled=False)
            setup = prepare_replay(target, parts[0].trace, plan, asked, lambda _: None)
            contest = Contest(target, setup.load, control, parts, given.part, recipe.sla)
            for one in parts:  # the server settles
                contest.replay(one.trace.take(slice(0, int(len(one.trace) * SETTLES))))
            order = KeepOrder(
                plan,
                passes,
                owned=False,
                rules=rules,
                dry=False,
                horizon_s=3.0 * given.part,
                every_s=given.every,
            )
            before = contest.whole()
            keeper = KeeperProcess(order, server.url, KEY, say)
            keeper.start()
            time.sleep(START_S)
            kept = contest.whole()
            keeper.stop()
            control.set(start, "the plan's, throughout")
            after = contest.whole()
            best = contest.at_best()
    show([one.kind for one in parts], kept, before, after, best)


def show(
    parts: Sequence[str],
    kept: Sequence[float],
    before: Sequence[float],
    after: Sequence[float],
    best: Sequence[float],
) -> None:
    """The goodput of each part and of all: kept tuned, fixed before and after that, and best."""
    print("\nGoodput, the share of requests that kept all targets")
    columns = ["part", "kept tuned", "fixed: before, after", "best by the fit"]
    print(f"\n| {' | '.join(columns)} | of the best known | of the fixed |")
    print("|---|---:|---:|---:|---:|---:|")
    rows = [*zip(parts, kept, before, after, best, strict=True)]
    means = [float(np.mean(each)) for each in (kept, before, after, best)]
    rows.append(("all", means[0], means[1], means[2], means[3]))
    for name, one, first, second, hindsight in rows:
        fixed = (first + second) / 2.0
        known = max(fixed, hindsight)
        of_best = f"{100 * one / known:.0f} %" if known else ""
        of_fixed = f"{100 * one / fixed:.0f} %" if fixed else ""
        print(
            f"| {name} | {100 * one:.1f} % | {100 * first:.1f} %, {100 * second:.1f} % "
            f"| {100 * hindsight:.1f} % | {of_best} | {of_fixed} |"
        )
    found = {"parts": parts, "kept": kept, "before": before, "after": after, "best": best}
    keep("goodput", found)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path)
    add_vllm(parser)
    parser.add_argument("--part", type=float, default=80.0, help="seconds of each part")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two looks")
    parser.add_argument("--block", type=float, default=4.0, help="seconds of a block of traffic")
    parser.add_argument("--watch", type=float, default=24.0, help="seconds of a watch")
    parser.add_argument("--requests-min", type=int, default=30, help="that a decision needs")
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("kept-live"))
    given = parser.parse_args()
    os.environ[PYTHON_VARIABLE] = given.vllm_python
    return ended(lambda: run(given))


if __name__ == "__main__":
    sys.exit(main())
