"""`llmctl serve --keep-tuned`: the keeper beside a running server, with its clock and its log.

Every `every_s` it reads the passes since, fits the law of the last minutes again, and asks the
keeper. A dry run says what it would do and changes nothing.

Behind a front that starts several servers, one of them is kept tuned by its own traffic. A change
reaches the others once it is no longer watched there and was not taken back.

It runs in a process of its own (`KeeperProcess`), as idle work. As a thread of a front it could
hold the interpreter's lock while a busy machine does not let it run; then all requests would wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context, parent_process
from multiprocessing.synchronize import Event
from pathlib import Path

import msgspec

from toolkit.backends.vllm.from_log import PassHistory
from toolkit.bench.predict import PREDICTED, TOOK, counts_or_none
from toolkit.endpoints.settings import LiveState, SettingsClient
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.live.keep import Keeper, KeepRules, Seen, Step
from toolkit.live.law import refitted
from toolkit.live.space import Settings
from toolkit.live.traffic import TrafficLog
from toolkit.sim.world import world_of

OWNER = "llmctl serve --keep-tuned"
REFIT_EVERY = 4  # steps
IDLE = 3.0  # times the time of a step that it waits at least: simulations take a processor
BEHIND_THE_SERVER = 15  # its niceness, where it cannot be idle work
STOP_S = 0.5  # that a step may take to end
FOUND_MOST = 0.1  # of the prompts' tokens in the cache; more is traffic that the log does not show


@dataclass(frozen=True, slots=True)
class KeepOrder:
    """What is kept tuned, and how.

    Attributes:
        log: the server's passes; `owned`: no other program reads it.
        dry: say what would be done, and do nothing.
        horizon_s: how much traffic is looked at.
        replica: behind a front, the server that writes the log, and is tuned first; '': there is
            one server.
    """

    plan: Plan
    log: Path
    owned: bool
    rules: KeepRules
    dry: bool = True
    horizon_s: float = 900.0
    every_s: float = 15.0
    replica: str = ""


class KeeperProcess:
    """Keeps the server at `url` tuned until `stop`, with the key of its control. `say`, a function
    of a module, is called in the other process.
    """

    def __init__(self, order: KeepOrder, url: str, key: str, say: Callable[[str], None]) -> None:
        context = get_context("spawn")
        self._ended = context.Event()
        given = (order, url, key, say, self._ended)
        self._process = context.Process(target=_keep, args=given, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._process.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def stop(self) -> None:
        """End; the server keeps its settings."""
        self._ended.set()
        self._process.join(STOP_S)
        self._process.terminate()
        self._process.join(STOP_S)
        self._process.kill()  # it runs when nothing else does: a busy machine may not let it end
        self._process.join()


def _keep(order: KeepOrder, url: str, key: str, say: Callable[[str], None], ended: Event) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    _stand_back()
    KeptTuned(order, SettingsClient(url, key, OWNER), say).run(ended)


class KeptTuned:
    """Keeps a server tuned; `say` gets a line for each step that is not like the one before."""

    def __init__(
        self, order: KeepOrder, control: SettingsClient, say: Callable[[str], None]
    ) -> None:
        self._order = order
        self._control = control
        self._say = say
        self._keeper = Keeper(order.rules, order.plan.policy.parameters, order.plan.recipe.sla)
        self._log = TrafficLog(order.log, owned=order.owned, horizon_s=order.horizon_s)
        recipe = order.plan.recipe
        kinds = order.plan.kinds
        self._world = world_of(kinds, max_new_tokens=recipe.serve.max_new_tokens)
        self._steps = 0
        self._counts: dict[str, float] = {}
        self._made: Settings = {}  # the newest values that it gave
        self._said = ""

    def run(self, ended: Event) -> None:
        """One step after the other, until `ended` or the parent process has gone."""
        parent = parent_process()
        wait_s = self._order.every_s
        while not ended.wait(wait_s) and (parent is None or parent.is_alive()):
            begun_s = time.monotonic()
            try:
                step = self.step(begun_s)
            except InputError as error:
                step = Step("wait", f"{error.message}")
            self._tell(step)
            wait_s = max(self._order.every_s, IDLE * (time.monotonic() - begun_s))

    def step(self, now_s: float) -> Step:
        """One step. Raises `InputError` where the server or its log cannot be read."""
        order = self._order
        state = self._control.get()
        if state.lease is not None and state.lease.owner != OWNER:
            return Step("wait", f"{state.lease.owner} tunes this server: nothing is changed")
        if order.replica and order.replica not in state.replicas:
            return Step("wait", f"replica {order.replica} is not ready")
        values = state.replicas.get(order.replica, state.values)
        url = state.urls.get(order.replica, self._control.url)
        try:
            self._log.update(now_s)
        except msgspec.DecodeError as error:
            raise InputError(f"{order.log}: not a log of passes: {error}") from None
        since_s = now_s - order.horizon_s
        found = self._log.found_share(since_s)
        if found > FOUND_MOST:
            share = f"{100 * found:.0f} % of the prompts' tokens were in the cache"
            return Step("wait", f"{share}: what prompts share is not recorded, nothing is changed")
        if self._steps % REFIT_EVERY == 0:
            self._refit(since_s)
        self._steps += 1
        traffic, served = self._log.requests(since_s)
        seen = Seen(since_s, traffic, served, self._log.unfinished(), self._slowdown(url))
        current = {name: values[name] for name in order.rules.bounds if name in values}
        step = self._keeper.step(now_s, seen, current, self._world)
        if order.dry:
            self._keeper.forget()
            return replace(step, settings={})
        if step.settings:
            self._control.set(step.settings, step.line, order.replica)
            self._made = self._made | step.settings
        elif step.kind in ("good", "keep"):  # nothing is being watched
            made = self._made.items()
            self._share({name: value for name, value in made if current[name] == value}, state)
        return step

    def _share(self, settings: Settings, state: LiveState) -> None:
        """Give what is good on the server that is tuned first to the others."""
        others = [
            name
            for name, values in state.replicas.items()
            if any(values[key] != value for key, value in settings.items())
        ]
        if not others:
            return
        self._control.set(settings, f"as replica {self._order.replica}")
        words = ", ".join(f"{name}={value}" for name, value in settings.items())
        self._say(f"keep-tuned: all replicas have {words}")

    def _refit(self, since_s: float) -> None:
        """The law of the passes of the last minutes, if they show one; else the one so far."""
        header = self._log.header
        passes = [one for one in self._log.passes if one.start_s >= since_s]
        if header is None:
            return
        with contextlib.suppress(InputError):
            history = PassHistory(header, passes)
            self._world = refitted(self._order.plan.recipe, self._world, history)

    def _slowdown(self, url: str) -> float:
        """The time of passes since the last step over the law's; 1 where it is not known."""
        before = self._counts
        self._counts = counts_or_none(Target(url, "", "", None, own=False))
        took_s = self._counts.get(TOOK, 0.0) - before.get(TOOK, 0.0)
        expected_s = self._counts.get(PREDICTED, 0.0) - before.get(PREDICTED, 0.0)
        return took_s / expected_s if before and expected_s > 0.0 else 1.0

    def _tell(self, step: Step) -> None:
        """Say a step that is news, and leave it with the server, for `llmctl set` and its log."""
        if step.kind == "change" and self._order.dry:
            line = f"keep-tuned, a dry run: would change {step.line}"
        elif step.kind == "change" and self._order.replica:
            line = f"keep-tuned, on replica {self._order.replica} first: {step.line}"
        else:
            line = f"keep-tuned: {step.line}"
        if line == self._said:
            return
        self._said = line
        self._say(line)
        try:
            self._control.tell(line)
        except InputError as error:
            self._say(f"keep-tuned: {error.message}")


def _stand_back() -> None:
    """Let this process run only where no other work wants the processor: a pass of the server that
    begins interrupts it at once. Niceness alone lets it run for its slice of some milliseconds.
    """
    os.nice(BEHIND_THE_SERVER)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def bounds_of(
    words: Sequence[str], state_bounds: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """The operator's bounds, from words like max_num_seqs=16:128, within those of the server.
    `InputError` for any other word.
    """
    found = {}
    for word in words:
        name, equals, span = word.partition("=")
        low, colon, high = span.partition(":")
        try:
            bounds = float(low), float(high)
        except ValueError:
            bounds = (1.0, 0.0)
        if not (equals and colon and bounds[0] <= bounds[1]):
            raise InputError(f"'{word}' is not KEY=LOW:HIGH", "such as max_num_seqs=16:128")
        known = state_bounds.get(name)
        if known is None:
            raise InputError(f"{name} is not kept tuned", f"these are: {', '.join(state_bounds)}")
        if bounds[0] < known[0] or bounds[1] > known[1]:
            raise InputError(
                f"{word}: the server's bounds are {known[0]:g} to {known[1]:g}",
                "stay within them, or start the server with wider ones",
            )
        found[name] = bounds
    return found or dict(state_bounds)
