"""The JSON of answers in OpenAI's format: those of our own engines, and the rest of an answer that
another replica continues.
"""

from __future__ import annotations

from typing import Any


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The token counts of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def kind_of(*, chat: bool, whole: bool = False) -> str:
    """What an answer, or a part of a stream, is called in its field `object`."""
    if not chat:
        return "text_completion"
    return "chat.completion" if whole else "chat.completion.chunk"


def choice_of(
    index: int, text: str, finish: str | None, *, chat: bool, whole: bool = False, role: str = ""
) -> dict[str, Any]:
    """One choice of an answer, or its new text in a stream; `role`: of a chat's first text."""
    choice: dict[str, Any] = {"index": index}
    if not chat:
        choice["text"] = text
    elif whole:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["delta"] = {"role": role, "content": text} if role else {"content": text}
    return choice | {"logprobs": None, "finish_reason": finish or None}
