"""The settings of a scheduler that takes new ones while it serves, and its control.

A knob is a setting with its bounds, and how it is read and applied. The parameters of a policy of
llmctl's inside vLLM are knobs (`policy.NAME`), and so are vLLM's settings
(`toolkit.backends.vllm.knobs`). `SettingsControl` answers requests for new values, which reach
it over HTTP (`toolkit.backends.vllm.control`), between two passes or ticks.

A tuner holds a lease, which ends by itself: then the settings from before it are back. Meanwhile no
other program changes settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from toolkit.errors import InputError, nearest
from toolkit.sched.policies.parameters import LARGEST_WHOLE, Parameter, Value, check
from toolkit.sched.scheduler import Scheduler

MAX_LEASE_S = 600.0
MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting of a scheduler. `limits`: the bounds of the value, with its meaning; `beyond` says
    what a value above them needs.
    """

    name: str
    kind: type
    limits: Parameter
    read: Callable[[], Value]
    apply: Callable[[Any], None]
    beyond: str = ""


class Knobs:
    """The knobs of a scheduler, which has just been made: its values are the start's.

    Args:
        restarts: what other settings need instead, by name.

    Attributes:
        start: the values of the start, by name.
    """

    def __init__(self, knobs: Sequence[Knob], restarts: Mapping[str, str]) -> None:
        self._knobs = {knob.name: knob for knob in knobs}
        self._restarts = restarts
        self.start = self.values()

    def values(self) -> dict[str, Value]:
        """The current values, by name."""
        return {name: knob.read() for name, knob in self._knobs.items()}

    def described(self) -> list[dict[str, Any]]:
        """Each knob as plain values: name, value, start, bounds, choices, meaning."""
        lines: list[dict[str, Any]] = []
        for name, knob in self._knobs.items():
            limits = knob.limits
            numeric = knob.kind in (int, float)
            lines.append(
                {
                    "name": name,
                    "value": knob.read(),
                    "start": self.start[name],
                    "low": limits.low if numeric else None,
                    "high": limits.high if numeric and limits.high < math.inf else None,
                    "choices": list(limits.choices) or ([] if numeric else [False, True]),
                    "doc": limits.doc,
                    "beyond": knob.beyond,
                }
            )
        return lines

    def refuse(self, settings: Mapping[str, Any]) -> None:
        """`InputError` for a setting that is no knob here, and for a value outside its bounds."""
        for name, value in settings.items():
            knob = self._knobs.get(name)
            if knob is None:
                if name in self._restarts:
                    raise InputError(f"{name} needs {self._restarts[name]}", "tune it offline")
                raise InputError(
                    f"there is no live setting '{name[:80]}'", nearest(name, [*self._knobs])
                )
            _check(knob, value)

    def apply(self, settings: Mapping[str, Any]) -> dict[str, Value]:
        """Give the scheduler new values, all or none. Returns the changed ones. Call it between two
        passes. `refuse` says what is refused.
        """
        self.refuse(settings)
        changed: dict[str, Value] = {}
        for name, value in settings.items():
            knob = self._knobs[name]
            if knob.kind is float:
                value = float(value)
            if knob.read() != value:
                knob.apply(value)
                changed[name] = value
        return changed


def _check(knob: Knob, value: Any) -> None:
    """`InputError` for a value outside the knob's bounds, with the bounds."""
    limits = knob.limits
    try:
        check("the running server", knob.name, knob.kind, value, limits)
    except InputError as error:
        hint = error.hint
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if knob.beyond and is_number and value > limits.high:
            hint = knob.beyond
        raise InputError(error.message, hint) from None


def knobs_of_policy(
    scheduler: Scheduler, configure: Callable[[Mapping[str, Value]], None]
) -> list[Knob]:
    """The parameters of a scheduler's policy, as far as they can change; `configure` changes
    them.
    """

    def knob(name: str, limits: Parameter, kind: type) -> Knob:
        return Knob(
            f"policy.{name}",
            kind,
            limits,
            lambda: getattr(scheduler.policy, name),
            lambda value: configure({name: value}),
        )

    found = []
    for name, limits in scheduler.live_parameters().items():
        kind = type(getattr(scheduler.policy, name))
        high = min(limits.high, float(LARGEST_WHOLE)) if kind is int else limits.high
        bounded = Parameter(limits.low, high, limits.search, limits.log, limits.doc, limits.choices)
        found.append(knob(name, bounded, kind))
    return found


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asks for.

    Attributes:
        settings: new values by name; all are taken, or none.
        owner: the tuner that holds or wants the lease; '': none, for a change by hand.
        lease_s: seconds from now that the lease lasts; 0 ends it; None: nothing about it.
        why: for the log, in one line; without settings it is a word that `llmctl set` shows.
    """

    settings: dict[str, bool | int | float | str] = msgspec.field(name="set", default_factory=dict)
    owner: str = ""
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_LEASE_S)] | None = None
    why: str = ""


def request_of(fields: object) -> ControlRequest:
    """A client's request from plain values, its texts cut; `InputError` if it is none."""
    try:
        request = msgspec.convert(fields, ControlRequest)
    except msgspec.ValidationError as error:
        raise InputError(
            f"no request for settings: {error}", "it has set, owner, lease_s and why alone"
        ) from None
    if request.lease_s is not None and not request.owner:
        raise InputError("a lease has an owner", "send one with lease_s")
    owner, why = _plain(request.owner)[:MAX_NAME], _plain(request.why)[:200]
    return msgspec.structs.replace(request, owner=owner, why=why)


def _plain(text: str) -> str:
    """A text for logs and terminals: one line, with '?' for what is no character to be seen."""
    return "".join(one if one.isprintable() else "?" for one in " ".join(text.split()))


@dataclass(frozen=True, slots=True)
class Lease:
    """The tuner that may change settings until `until_s`, and the settings from before."""

    owner: str
    until_s: float
    before: dict[str, Value]


class SettingsControl:
    """The settings of one scheduler, in its own process. All calls are between two passes.

    Args:
        tell: gets each change, and why.
        clock: seconds of a clock that never goes back.

    Attributes:
        changed: what has changed since `take` was called last; at first, all settings.
    """

    def __init__(
        self,
        live: Knobs,
        tell: Callable[[Mapping[str, Value], str], None],
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._tell = tell
        self._clock = clock
        self._lease: Lease | None = None
        self._changes = 0
        self._word = ""  # the newest one
        self.changed = live.values()

    def begin(self, planned: Mapping[str, Value]) -> None:
        """Begin with the planned values of those settings that are live."""
        known = self._live.values()
        self._apply({name: planned[name] for name in planned if name in known}, "the plan's")

    def take(self) -> dict[str, Value]:
        """What has changed since the last call."""
        changed = self.changed
        if changed:
            self.changed = {}
        return changed

    def expire(self) -> None:
        """End a lease that was not renewed in time: the settings from before it are back."""
        lease = self._lease
        if lease is None or self._clock() < lease.until_s:
            return
        self._lease = None
        self._apply(lease.before, f"the lease of {lease.owner} ended without a word")

    def handle(self, fields: object) -> dict[str, Any]:
        """Answer a client's request, in plain values. `error`, `hint` and `status` say why it was
        refused; then nothing has changed.
        """
        self.expire()
        try:
            request = request_of(fields)
        except InputError as error:
            return {"error": error.message, "hint": error.hint, "status": 400}
        try:
            lease = self._lease
            wants = bool(request.settings or request.why) or request.lease_s is not None
            if lease is not None and wants and request.owner != lease.owner:
                return self._held(lease)
            self._live.refuse(request.settings)
        except InputError as error:
            return {"error": error.message, "hint": error.hint, "status": 422}
        if request.lease_s:
            before = self._live.values() if lease is None else lease.before
            self._lease = Lease(request.owner, self._clock() + request.lease_s, before)
        if request.why:
            self._word = request.why
        changed = self._apply(request.settings, request.why or request.owner or "set by hand")
        if request.lease_s == 0:
            self._lease = None
        return self._state() | {"changed": changed}

    def _held(self, lease: Lease) -> dict[str, Any]:
        left_s = lease.until_s - self._clock()
        return {
            "error": f"{lease.owner} tunes this server: no other program changes its settings",
            "hint": f"end it, or wait: without a word from it, its lease ends in {left_s:.0f} s",
            "status": 409,
        }

    def _apply(self, settings: Mapping[str, Any], why: str) -> dict[str, Value]:
        changed = self._live.apply(settings)
        if changed:
            self._changes += 1
            self.changed |= changed
            self._tell(changed, why)
        return changed

    def _state(self) -> dict[str, Any]:
        lease = self._lease
        held = None
        if lease is not None:
            held = {"owner": lease.owner, "left_s": lease.until_s - self._clock()}
        return {
            "settings": self._live.described(),
            "lease": held,
            "changes": self._changes,
            "word": self._word,
        }
