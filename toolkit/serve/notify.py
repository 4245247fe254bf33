"""What a service manager is told: that the server is ready, and from then on that its loop still turns.

systemd's protocol, one datagram each time (sd_notify(3), sd_watchdog_enabled(3)).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

USEC = 1e-6


@dataclass(slots=True, frozen=True)
class Manager:
    """Who started this process and wants to be told; `address` is '' where nobody does.

    A server that has said nothing for `watchdog_s` seconds is ended, and as a rule started again; None: it is not.
    """

    address: str = ""
    watchdog_s: float | None = None

    @classmethod
    def take(cls) -> Manager:
        """From the environment, and out of it: workers inherit that."""
        address, limit, process = (
            os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
        )
        asked = limit.isdecimal() and process in ("", str(os.getpid()))
        return cls(address, int(limit) * USEC if asked else None)

    def tell(self, state: str, *, flags: int = 0) -> None:
        """Send `state`, like READY=1. A leading '@' of the address is Linux' abstract space. `flags`: as of send(2)."""
        if not self.address:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(name)
            manager.send(state.encode(), flags)

    async def keep_told(self, well: Callable[[], bool]) -> None:
        """Tell twice in `watchdog_s` that the server is well, if it is; a loop that stands still tells nothing."""
        while self.watchdog_s:
            if well():
                with contextlib.suppress(
                    OSError
                ):  # it starts itself anew, or has no time to read; the next one arrives
                    self.tell("WATCHDOG=1", flags=socket.MSG_DONTWAIT)
            await asyncio.sleep(self.watchdog_s / 2)
