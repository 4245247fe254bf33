"""What a profile measures of rounds, on engines that keep their rows: parts, how many rows enter, whole sequences.

Prefills and decode steps are in the grid, as such an engine makes them in rounds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from toolkit.files.profile import EngineFacts, FailedPoint, MemoryPoint, RoundSequence, RoundsProfile
from toolkit.files.recipe import Recipe
from toolkit.profiling.bench import RoundBench, Unmeasurable
from toolkit.profiling.grid import part_points
from toolkit.profiling.journal import Journal
from toolkit.profiling.measure import round_parts
from toolkit.profiling.memory import admission_lengths, probe_admission, safe_tokens
from toolkit.profiling.sequences import Ranges, run_sequences
from toolkit.workers.protocol import Workers

MIB = 1 << 20
HOST_SHARE = 0.5  # of the machine's memory that all workers' swapped caches may take where the recipe sets no bound


class RoundsStage:
    """The rounds' share of a profile: what is left to do, doing it, and what came of it."""

    def __init__(self, recipe: Recipe, facts: EngineFacts, journal: Journal) -> None:
        self._recipe, self._facts, self._journal = recipe, facts, journal
        self.points = part_points(recipe.profile, facts)

    def lengths_left(self) -> list[int]:
        """At which rows have not been admitted yet."""
        lengths = admission_lengths(self._recipe.profile, self._facts)
        return [length for length in lengths if _admission_key(length) not in self._journal.results]

    def sequences_left(self) -> list[int]:
        """The numbers of those that the journal does not know."""
        numbers = range(self._recipe.profile.sequences)
        return [number for number in numbers if _sequence_key(number) not in self._journal.results]

    def probe_admission(self, bench: RoundBench, advance: Callable[[str], None]) -> None:
        """How many rows may enter, at each length."""
        for length in self.lengths_left():
            result: MemoryPoint | FailedPoint
            try:
                result = probe_admission(bench, length)
            except Unmeasurable as reason:
                result = FailedPoint(kind="memory", batch_size=0, length=length, reason=str(reason))
            self._journal.put(_admission_key(length), result)
            advance(f"rows of {length} enter")

    def run_sequences(self, workers: Workers, advance: Callable[[str], None]) -> None:
        """Whole rounds, through the workers' processes."""

        def record(number: int, result: RoundSequence | FailedPoint) -> None:
            self._journal.put(_sequence_key(number), result)
            advance(f"rounds {number + 1} of {self._recipe.profile.sequences}")

        ranges = Ranges(self._recipe.profile, self._facts, safe_tokens(self._admissions(), self._facts))
        asyncio.run(run_sequences(workers, self.sequences_left(), ranges, record))

    def result(self) -> RoundsProfile:
        """The profile's section."""
        results = self._journal.results
        return RoundsProfile(
            parts=round_parts(self.points, self._recipe.profile, results),
            sequences=[result for result in results.values() if isinstance(result, RoundSequence)],
            memory=self._admissions(),
            host_bytes=self._host_bytes(),
        )

    def _admissions(self) -> list[MemoryPoint]:
        results, lengths = self._journal.results, admission_lengths(self._recipe.profile, self._facts)
        found = (results.get(_admission_key(length)) for length in lengths)
        return [probe for probe in found if isinstance(probe, MemoryPoint)]

    def _host_bytes(self) -> int:
        """Of one worker: the recipe's bound, else its part of half the machine's memory."""
        bound = self._recipe.engine.swap_memory_mib
        if bound is not None:
            return int(bound * MIB)
        total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(HOST_SHARE * total_bytes) // self._recipe.workers


def _admission_key(length: int) -> str:
    return f"admission/{length}"


def _sequence_key(number: int) -> str:
    return f"rounds/{number}"
