"""From tokens to the text that a client may see: detokenised as it comes, and cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.engines.protocol import FinishReason
from toolkit.engines.tokenizer import Detokenizer


class StopFinder:
    """Finds stop strings in text that comes in pieces. The result does not depend on where the pieces end.

    The match that is complete first wins, as if the text came one character at a time; of two that are complete at the
    same character, the longer. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop string ended it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Where the longest end of `text` starts that a stop string begins with; its length if none does."""
        for start in range(max(len(text) - self._longest + 1, 0), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)


@dataclass(slots=True, frozen=True)
class Shown:
    """What a client gets of some new tokens. `tokens` counts those up to the end, which a stop string may move up."""

    text: str
    tokens: int
    finish: FinishReason


@dataclass(slots=True)
class TextOutput:
    """The text of one choice. Stop strings are not looked for in the first `min_tokens` tokens."""

    detokenizer: Detokenizer
    stops: Sequence[str] = ()
    min_tokens: int = 0
    tokens: int = 0
    _finder: StopFinder = field(init=False)

    def __post_init__(self) -> None:
        self._finder = StopFinder(self.stops)

    def feed(self, tokens: Sequence[int], finish: FinishReason) -> Shown:
        """New tokens of the engine. One that ended the row (`finish` is 'stop') counts, and has no text."""
        visible = tokens[:-1] if finish == "stop" else tokens
        if not self.stops:
            text = self.detokenizer.feed(visible)
        else:
            text, used, stopped = self._search(visible)
            if stopped:
                self.tokens += used
                return Shown(text, used, "stop")
        if finish:
            rest, stopped = self._finder.feed(self.detokenizer.flush())
            text += rest if stopped else rest + self._finder.flush()
            finish = "stop" if stopped else finish
        self.tokens += len(tokens)
        return Shown(text, len(tokens), finish)

    def _search(self, tokens: Sequence[int]) -> tuple[str, int, bool]:
        """One token at a time, so that the count of tokens does not depend on how they were delivered."""
        pieces: list[str] = []
        for used, token in enumerate(tokens, start=1):
            piece = self.detokenizer.feed((token,))
            if self.tokens + used > self.min_tokens:
                piece, stopped = self._finder.feed(piece)
                if stopped:
                    return "".join([*pieces, piece]), used, True
            pieces.append(piece)
        return "".join(pieces), len(tokens), False
