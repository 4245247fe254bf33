"""Chat templates: from a list of messages to the text that a model was trained on.

A template comes with a model, never from a request. It runs in jinja2's immutable sandbox, with bounds on its size, on
what it writes and on its time, because a model's folder is data that someone downloaded.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import EngineError, InputError

MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEXT_CHARS = 1 << 24
MAX_RENDER_S = 5.0

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# What a template may fail with when messages are not as it expects them: that is the sender's error, and no crash.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: jinja2 text; the default names each speaker.
        special_tokens: `bos_token` and the like, which templates refer to.
        clock: seconds, for the bound on time.

    Raises `EngineError` for a template that is too large or does not compile.
    """

    def __init__(
        self,
        source: str = DEFAULT_TEMPLATE,
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise EngineError(f"the chat template does not compile: {error}", "it comes with the model") from None
        self._special_tokens = dict(special_tokens or {})
        self._clock = clock

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text. `InputError` where the template refuses these messages or writes too much."""
        stop_s = self._clock() + MAX_RENDER_S
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **self._special_tokens
            ):
                size += len(piece)
                if size > MAX_TEXT_CHARS or self._clock() > stop_s:
                    raise InputError("messages: the model's chat template writes too much or takes too long")
                pieces.append(piece)
        except _FAILURES as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox bounds `range`; this also keeps a template from multiplying or padding a string into gigabytes."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = (int, float)
        if not (isinstance(left, numbers) and isinstance(right, numbers)):
            raise SecurityError(f"'{operator}' is for numbers here")
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"the exponent {right} is too large")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """As transformers does: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
