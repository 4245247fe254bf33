"""Other words in the messages of errors, which a test must not depend on: `pytest --reword`.

A test asserts the type of an error, its exit code, and the names and numbers in its message: a
sentence may become a better one without a test that fails.
"""

import re

import pytest

from toolkit.errors import LlmctlError

OTHER = {"the": "that", "is": "was", "are": "were", "not": "never", "has": "had", "needs": "wants"}
WORDS = re.compile(r"\b(" + "|".join(OTHER) + r")\b(?![-_.=/])")


def reworded(text: str) -> str:
    return WORDS.sub(lambda found: OTHER[found[0]], text)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reword", action="store_true", help="other words in messages: no test may fail for that"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--reword"):
        return
    first = LlmctlError.__init__

    def init(self: LlmctlError, message: str, hint: str = "") -> None:
        first(self, reworded(message), reworded(hint))

    LlmctlError.__init__ = init  # type: ignore[method-assign]
