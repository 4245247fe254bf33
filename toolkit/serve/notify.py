"""Telling a service manager that the server is ready: systemd's notification protocol, one datagram (sd_notify(3))."""

from __future__ import annotations

import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def take_notify_socket() -> str:
    """The manager's socket, '' where nobody asked; it leaves the environment, which workers inherit."""
    return os.environ.pop(VARIABLE, "")


def notify(address: str, state: str) -> None:
    """Send `state`, like READY=1, to the socket `address`; '' sends nothing. A leading '@' is Linux' abstract space."""
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect(name)
        manager.sendall(state.encode())
