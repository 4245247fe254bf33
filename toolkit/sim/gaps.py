"""The largest gap between two tokens of any request, for a worker whose residents all get their tokens together.

A gap concerns all who are resident while it lasts, so gaps are kept once, not per request: on a stack of those that no
later one exceeded. A request remembers a mark from when it joined; its largest gap is found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left


class Gaps:
    """Gaps in seconds, by marks that count up as requests join: a gap with mark m concerns those who joined up to m."""

    __slots__ = ("_gaps", "_mark", "_marks", "_waits", "last_s")

    def __init__(self) -> None:
        self._mark = 0
        self._marks: list[int] = []  # of the stack, ascending
        self._gaps: list[float] = []  # of the stack, descending
        self._waits: list[tuple[int, float]] = []  # (mark, since when those up to it wait for their next token)
        self.last_s = -1.0  # the last decode step's end

    def mark(self, *, alone: bool) -> int:
        """The mark of those who join now. `alone`: nobody else is resident, so what was does not matter any more."""
        if alone:
            self._marks.clear()
            self._gaps.clear()
            self._waits.clear()
        self._mark += 1
        return self._mark

    @property
    def waiting_since(self) -> float:
        """Since when all residents wait for their next token; -1: not all since the same time."""
        return self._waits[0][1] if len(self._waits) == 1 else -1.0

    def since(self, mark: int) -> float:
        """Since when those with this mark wait for their next token."""
        return next(since_s for upto, since_s in self._waits if mark <= upto)

    def joined(self, at_s: float, mark: int = 0) -> None:
        """Those who joined last, or with this mark, got a token at `at_s`."""
        self._waits.append((mark or self._mark, at_s))

    def end_waits(self, at_s: float) -> None:
        """All residents got a token at `at_s`."""
        for mark, since_s in self._waits:
            self._push(mark, at_s - since_s)

    def push(self, gap_s: float) -> None:
        """All residents had a gap."""
        self._push(self._mark, gap_s)

    def wait_from(self, at_s: float) -> None:
        """All residents had a token at `at_s`, and wait for the next."""
        self._waits = [(self._mark, at_s)]
        self.last_s = at_s

    def stepped(self, first_s: float | None, last_gap_s: float | None, end_s: float) -> None:
        """All residents decoded, and had their last token at `end_s`: `end_waits`, `push` and `wait_from` at once.

        Args:
            first_s: when the first step ended; None where the gap that it ended is not looked at.
            last_gap_s: seconds of the last step; None where it was the first.
        """
        gaps, marks = self._gaps, self._marks
        if first_s is not None:
            for mark, since_s in self._waits:
                gap_s = first_s - since_s
                while gaps and gaps[-1] <= gap_s:
                    gaps.pop()
                    marks.pop()
                gaps.append(gap_s)
                marks.append(mark)
        if last_gap_s is not None:
            while gaps and gaps[-1] <= last_gap_s:
                gaps.pop()
                marks.pop()
            gaps.append(last_gap_s)
            marks.append(self._mark)
        self._waits = [(self._mark, end_s)]
        self.last_s = end_s

    def largest(self, mark: int) -> float:
        """The largest gap since those with this mark joined; 0 for none."""
        k = bisect_left(self._marks, mark)
        return self._gaps[k] if k < len(self._gaps) else 0.0

    def _push(self, mark: int, gap_s: float) -> None:
        gaps, marks = self._gaps, self._marks
        while gaps and gaps[-1] <= gap_s:
            gaps.pop()
            marks.pop()
        gaps.append(gap_s)
        marks.append(mark)
