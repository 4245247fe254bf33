"""What all tests share."""

import signal


def pytest_configure() -> None:
    """A shell that starts the tests in the background has SIGINT ignored; the tests send it, so it must count."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
