"""The errors that a user can cause or meet: one small tree, each class with its exit code.

Any other exception is a bug and stays loud. The command line prints the message and the hint of a
`LlmctlError`, one line each, and exits with its code. docs/reference/errors.md documents the codes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class LlmctlError(Exception):
    """Base of all errors for users: one line, and a hint with the remedy.

    `message` names the value and the limit; `hint` names the remedy.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.hint)

    @property
    def whole(self) -> str:
        """The message with its hint, for places that have room for one text."""
        return f"{self.message}; {self.hint}" if self.hint else self.message


class InputError(LlmctlError):
    """User input that cannot be used: a file, a key, a value, an option."""

    exit_code = 2


class StaleError(InputError):
    """A file was made from other inputs, or from inputs that have changed since.

    The hint names the command that makes it anew.
    """


class ForeignError(InputError):
    """A measurement from another device, engine, version or model would be used here.

    The message names both sides.
    """


class EngineError(LlmctlError):
    """The engine, the model or the device cannot do what was requested."""

    exit_code = 3


class TargetMissedError(LlmctlError):
    """The work is done, but its result is outside a limit of the user (such as `--max-error`)."""

    exit_code = 4


class LimitsBrokenError(LlmctlError):
    """The search is done, but its recommendation is predicted to break limits of the recipe."""

    exit_code = 5


class LateClientError(LlmctlError):
    """The load generator was late itself: what it wrote is marked as not the server's figures."""

    exit_code = 6


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint with the nearest of `choices`, or with all of them if none is near."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(known)}"
