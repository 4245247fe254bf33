"""What a message says, whatever words it says it with."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


def says(text: str, *values: str) -> bool:
    """Whether `text` has each of these names, numbers and phrases, as whole words."""
    plain = " ".join(text.split())  # a terminal's width may break a phrase
    return all(re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", plain) for value in values)


@contextmanager
def logged_to(lines: list[str]) -> Iterator[None]:
    """Within the block, what a server logs goes to `lines`: level and text."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    logger = logging.getLogger("toolkit")
    listener = Listener()
    logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
