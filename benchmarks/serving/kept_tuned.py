"""A server that keeps itself tuned, while its traffic changes in mid-run, on virtual time.

    python -m benchmarks.serving.kept_tuned [--seeds 20] [--recipe llama-3.1-8b-h200-measured]
        [--part 900] [--every 15] [--horizon 900]

Twenty seconds a seed with compiled code. Three parts follow one another: short chats, long
documents, bursts of chats; their order, rates and lengths are drawn. The server is the simulator's
engine under a fitted law, four times slower than that GPU. The keeper (`toolkit.live.keep`) knows
that law with an error of up to 10 %. It sees lengths and times of requests that have ended, and how
far the others are, as a log of passes has them, and has its usual rules. Beside it stand the
settings of the start, and of each part those that are best in hindsight, of a grid; these begin the
part with an empty server.

Goodput is the share of a part's requests that keep all targets. The rule was made with seeds 100 to
104.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.live.ahead import Unfinished
from toolkit.live.keep import Keeper, KeepRules, Seen, slowed
from toolkit.live.space import ROWS, THRESHOLD, TOKENS, Settings, policy_of
from toolkit.live.traffic import OutputLengths
from toolkit.metrics import Served, meets_sla
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.paged_engine import PagedRun
from toolkit.sim.world import World, world_from_fit
from toolkit.traces.types import Trace

LAW_OFF = 0.1
MOST_TOKENS = 4096  # of an output, as clients say: the engine does not know the lengths
START: Settings = {ROWS: 128, TOKENS: 2048, THRESHOLD: 0}
BOUNDS = {ROWS: (8, 512), TOKENS: (512, 8192), THRESHOLD: (0, 2048)}
GRID = {ROWS: (64, 128, 256, 512), TOKENS: (512, 1024, 2048, 4096), THRESHOLD: (0, 512)}
SLOWER = 4.0  # than the fit's GPU: an hour of traffic has as many requests less
SLA = {"ttft_p99_s": 2.0 * SLOWER, "mtpot_p99_s": 0.08 * SLOWER}
LOADS = {"chats": (1.4, 2.2), "documents": (0.9, 1.4), "bursts": (1.0, 1.3)}  # drawn within


def part(kind: str, seconds: float, load: float, rng: np.random.Generator) -> Trace:
    """Requests of one part; `load` scales its rate."""
    rate = {"chats": 24.0, "documents": 3.0, "bursts": 16.0}[kind] * load / SLOWER
    count = int(rate * seconds)
    gaps = rng.exponential(1.0 / rate, count)
    if kind == "bursts":  # three times the rate in a third of the time
        at = np.cumsum(gaps / 3.0)
        gaps = np.diff(at + 40.0 * np.floor(at / 20.0), prepend=0.0)
    means = {"chats": (250, 180), "documents": (6000, 120), "bursts": (400, 150)}[kind]
    lengths = [np.clip(rng.gamma(2.0, mean / 2.0, count), 8, 5 * mean) for mean in means]
    prompts, outputs = (one.astype(np.int64) for one in lengths)
    arrival = np.cumsum(gaps)
    kept = arrival < seconds
    return Trace(arrival[kept], prompts[kept], outputs[kept], outputs[kept])


def joined(parts: Sequence[Trace], seconds: float) -> Trace:
    """The parts one after the other."""
    arrival = [one.arrival_s + k * seconds for k, one in enumerate(parts)]
    prompts = np.concatenate([one.prompt_tokens for one in parts])
    outputs = np.concatenate([one.output_tokens for one in parts])
    limits = np.full(len(prompts), MOST_TOKENS)
    return Trace(np.concatenate(arrival), prompts, outputs, limits)


class Server:
    """The engine on virtual time; its settings change between passes."""

    def __init__(self, trace: Trace, world: World, settings: Settings) -> None:
        self._requests, outputs = requests_of(trace, world.max_new_tokens)
        self._ledger = Ledger(trace.arrival_s.tolist(), outputs, 1)
        flags = policy_of({}, settings)
        self._run = PagedRun(0, world.engine(), flags, self._ledger, shares=False, tells=False)
        self._rows = [
            PagedRequest(number, request.prompt_tokens, outputs[number])
            for number, request in enumerate(self._requests)
        ]
        self._arrived = 0
        self._trace = trace

    def change(self, settings: Settings, now_s: float) -> None:
        self._run.change(settings, now_s)

    def advance(self, until_s: float) -> None:
        """Serve until then."""
        while True:
            came_s = math.inf
            if self._arrived < len(self._rows):
                came_s = self._requests[self._arrived].arrival_s
            if min(came_s, self._run.next_s) > until_s or (
                came_s == math.inf and self._run.next_s == math.inf
            ):
                return
            if came_s <= self._run.next_s:
                self._run.arrive(self._rows[self._arrived], came_s)
                self._arrived += 1
            else:
                self._run.work(drain=True, follow=False, until_s=came_s)

    def unfinished(self, lengths: OutputLengths) -> list[Unfinished]:
        """The requests that it has, as its log of passes tells them."""
        scheduler = self._run.scheduler
        assert isinstance(scheduler, PagedScheduler)
        found = []
        for row in [*scheduler.running, *scheduler.waiting, *self._run._arrived]:
            tokens = row.prompt
            cached = row.computed
            if row.end:
                tokens += row.left - (row.end - scheduler._steps)
                cached = tokens - 1
            generated = tokens - self._requests[row.number].prompt_tokens
            limit = self._requests[row.number].max_new_tokens
            left = lengths.expected(generated, limit) - generated
            found.append(Unfinished(tokens, cached, left))
        return found

    def served(self, first: int, last: int, now_s: float) -> Served:
        """Requests `first` to `last` - 1, as far as they have ended."""
        outcomes = self._ledger.outcomes[first:last]
        done = [one.ok and one.last_token_s <= now_s for one in outcomes]
        return Served(
            self._trace.arrival_s[first:last],
            np.array([one.first_token_s for one in outcomes]),
            np.array([one.last_token_s for one in outcomes]),
            np.array([one.output_tokens for one in outcomes], dtype=np.int64),
            np.array([one.max_gap_s for one in outcomes]),
            np.array(done, dtype=np.bool_),
        )


@dataclass(frozen=True)
class Outcome:
    """The goodput of each part: as kept, with the fixed settings, and with the best ones."""

    order: list[str]
    kept: list[float]
    fixed: list[float]
    best: list[float]
    changes: int
    back: int

    @property
    def of_best(self) -> list[float]:
        """Each part's share of the best."""
        return [k / b if b else 1.0 for k, b in zip(self.kept, self.best, strict=True)]

    @property
    def of_fixed(self) -> list[float]:
        """Each part's share of the fixed settings'."""
        return [k / f if f else 1.0 for k, f in zip(self.kept, self.fixed, strict=True)]


def goods(served: Served) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return meets_sla(served, SLA)


def run(
    seed: int, fit: Fit, seconds: float, every_s: float, horizon_s: float, *, show: bool = False
) -> Outcome:
    """One seed. The keeper looks every `every_s` at the traffic of `horizon_s`."""
    rng = np.random.default_rng(seed)
    order = [list(LOADS)[k] for k in rng.permutation(len(LOADS))]
    parts = [part(kind, seconds, float(rng.uniform(*LOADS[kind])), rng) for kind in order]
    trace = joined(parts, seconds)
    believed = slowed(world_from_fit(fit, workers=1, max_new_tokens=MOST_TOKENS), SLOWER)
    world = slowed(believed, float(rng.uniform(1.0 - LAW_OFF, 1.0 + LAW_OFF)))
    server = Server(trace, world, START)
    rules = KeepRules(BOUNDS, law_percent=100.0 * LAW_OFF)
    keeper = Keeper(rules, {}, SLA)
    current = dict(START)
    kinds = []
    now_s = every_s
    while now_s < seconds * len(parts):
        server.advance(now_s)
        since_s = max(now_s - horizon_s, 0.0)
        first, last = np.searchsorted(trace.arrival_s, [since_s, now_s]).tolist()
        recent = trace.take(slice(first, last))
        recent = replace(recent, arrival_s=recent.arrival_s - since_s)
        served = server.served(first, last, now_s)
        lengths = OutputLengths(recent.output_tokens[served.ok])
        usual = lengths.expected(0, MOST_TOKENS)  # of those that have not ended
        recent = replace(recent, output_tokens=np.where(served.ok, recent.output_tokens, usual))
        seen = Seen(since_s, recent, shifted(served, since_s), server.unfinished(lengths))
        step = keeper.step(now_s, seen, current, believed)
        kinds.append(step.kind)
        if step.settings:
            server.change(step.settings, now_s)
            current |= step.settings
        if show and step.kind not in ("keep", "wait"):
            lately = float(goods(served)[-30:].mean())
            print(f"  {now_s:6.0f} s {order[int(now_s // seconds)]:9} {lately:.2f} {step.line}")
        now_s += every_s
    server.advance(math.inf)
    whole = server.served(0, len(trace), math.inf)
    fixed = simulate(trace, policy_of({}, START), world).served
    of_part = (trace.arrival_s // seconds).astype(int)
    number = range(len(parts))
    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    best = []
    for one in parts:
        alone = [simulate(one, policy_of({}, each), world).served for each in grid]
        best.append(max(float(goods(each).mean()) for each in alone))
    as_kept = [float(goods(whole)[of_part == k].mean()) for k in number]
    as_fixed = [float(goods(fixed)[of_part == k].mean()) for k in number]
    if show:
        print(f"  parts {order}: kept {as_kept}, fixed {as_fixed}, best {best}")
    return Outcome(order, as_kept, as_fixed, best, kinds.count("change"), kinds.count("back"))


def shifted(served: Served, since_s: float) -> Served:
    """The same requests with times from `since_s` on."""
    return replace(
        served,
        arrival_s=served.arrival_s - since_s,
        first_token_s=served.first_token_s - since_s,
        finish_s=served.finish_s - since_s,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--recipe", default="llama-3.1-8b-h200-measured")
    parser.add_argument("--part", type=float, default=900.0)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--horizon", type=float, default=900.0)
    parser.add_argument("--show", action="store_true", help="print every step")
    given = parser.parse_args()
    recipe = load_recipe(recipe_path(given.recipe))
    fit = read_file(Fit, fit_path(Path(given.recipe)))
    print(f"{recipe.name}, targets {SLA}")
    found = []
    print(
        "| seed | parts: kept, fixed, best of a grid in hindsight | of the best | changes, back |"
    )
    print("|---:|---|---:|---:|")
    for seed in range(given.first, given.first + given.seeds):
        one = run(seed, fit, given.part, given.every, given.horizon, show=given.show)
        found.append(one)
        cells = [
            f"{name} {100 * kept:.1f}, {100 * fixed:.1f}, {100 * best:.1f}"
            for name, kept, fixed, best in zip(
                one.order, one.kept, one.fixed, one.best, strict=True
            )
        ]
        of_best = 100 * sum(one.kept) / sum(one.best)
        print(f"| {seed} | {'; '.join(cells)} | {of_best:.1f} % | {one.changes}, {one.back} |")
        sys.stdout.flush()
    show(found)


def show(found: Sequence[Outcome]) -> None:
    """Print what all seeds say together."""
    whole = [100 * sum(one.kept) / sum(one.best) for one in found]
    fixed = [100 * sum(one.fixed) / sum(one.best) for one in found]
    of_best = [100 * share for one in found for share in one.of_best]
    of_fixed = [100 * share for one in found for share in one.of_fixed]
    print(
        f"\nof the best: mean {np.mean(whole):.1f} %, least {min(whole):.1f} %, least of a part "
        f"{min(of_best):.1f} %; {sum(share < 90.0 for share in of_best)} of {len(of_best)} parts "
        "below 90 %"
    )
    print(f"the fixed settings: mean {np.mean(fixed):.1f} % of the best, least {min(fixed):.1f} %")
    print(
        f"over the fixed settings: least of a part {min(of_fixed):.1f} %; "
        f"{sum(share < 95.0 for share in of_fixed)} parts below 95 %"
    )
    keep("outcomes", [vars(one) for one in found])


if __name__ == "__main__":
    main()
