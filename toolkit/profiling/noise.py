"""How much of the machine other programs used while something was measured."""

from __future__ import annotations

import os
import time

import psutil


class OtherLoad:
    """The CPU time that others use from now on: not this process, nor its children once they have ended."""

    def __init__(self) -> None:
        self._start = _snapshot()

    def percent(self) -> float:
        """Of all CPUs' time since the start; what a hypervisor gave to others included."""
        wall_s, others_s = (now - then for now, then in zip(_snapshot(), self._start, strict=True))
        return max(0.0, 100.0 * others_s / max(wall_s, 1e-9))


def _snapshot() -> tuple[float, float]:
    """Seconds of all CPUs, and those that others used."""
    cpus = psutil.cpu_times()
    own = os.times()
    busy_s = sum(getattr(cpus, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    own_s = own.user + own.system + own.children_user + own.children_system
    return time.monotonic() * (psutil.cpu_count() or 1), busy_s - own_s
