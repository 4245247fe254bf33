"""The errors a user can cause or meet, one small tree, each with its exit code.

Everything else that is raised is a bug and stays loud. The command line prints the message and the
hint of a `LlmctlError`, one line each, and exits with its code; the codes are documented in
docs/errors.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class LlmctlError(Exception):
    """Base of all errors that are meant for the user: one line, and a hint that says what to do.

    `message` names the value and the limit; `hint` names the remedy.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(LlmctlError):
    """Something the user gave cannot be used: a file, a key, a value, an option."""

    exit_code = 2


class StaleError(InputError):
    """A file was made from other inputs, or from inputs that have changed since; the hint names the
    command that makes it of these.
    """


class ForeignError(InputError):
    """What was measured on another device, engine, version or model would be used here; both sides
    are named.
    """


class EngineError(LlmctlError):
    """The engine, the model or the device cannot do what was asked."""

    exit_code = 3


class TargetMissedError(LlmctlError):
    """The work was done, and its result is outside a limit that the user set (`--max-error` and the
    like).
    """

    exit_code = 4


class LimitsBrokenError(LlmctlError):
    """The search was done, and what it recommends is predicted to break limits of the recipe."""

    exit_code = 5


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint that names the nearest of `choices`, and all of them where none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(known)}"
