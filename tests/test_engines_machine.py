"""A hypothesis state machine over the engine `rebatch`: any moves, in any order, with memory that
fails at any point.

Each row gets the tokens that transformers' own generate() gives it alone, and only memory in use is
counted. `LLMCTL_EXAMPLES` is the number of runs of up to 50 rounds; 12 by default.
"""

import functools
import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from rounds import (
    DONE,
    PAUSED,
    RUNS,
    SWAPPED,
    WAITS,
    FailingAllocations,
    RoundDriver,
    generated_alone,
    kept_bytes,
    random_rows,
    rebatch_engine,
)
from slices import run_slice

pytestmark = pytest.mark.slow

ROWS = random_rows(1, 16)
KINDS = [
    (0, {}),
    (9, {}),
    (0, {"joining": "shape"}),
    (0, {"cuda_graphs": True}),
]  # chunk_tokens, and the engine's settings
WAYS = {  # the moves of a row in a round, by its state
    RUNS: [*[()] * 9, ("evict",), ("pause",), ("swap_out",)],
    PAUSED: [(), ("evict",), ("swap_out",), *[("resume",)] * 2],
    SWAPPED: [(), (), ("evict",), ("swap_in",), *[("swap_in", "resume")] * 2],
}
SEEDS = st.integers(0, (1 << 32) - 1)  # of a round's moves: hypothesis would draw only few
EXAMPLES = int(os.environ.get("LLMCTL_EXAMPLES", "12"))


@functools.cache
def alone() -> list[tuple[int, ...]]:
    return generated_alone("llama", ROWS)


class Rounds(RuleBasedStateMachine):
    """Joins, ends, evictions, pauses, resumes, swaps, interruptions, slices between rounds, and
    memory that runs out.
    """

    @initialize(kind=st.sampled_from(range(len(KINDS))))
    def begin(self, kind: int) -> None:
        chunk_tokens, changes = KINDS[kind]
        self.engine = rebatch_engine(**changes)
        self.driver = RoundDriver(self.engine, ROWS, chunk_tokens=chunk_tokens)
        self.driver.whole = kind in (0, 3, 4)  # shaping needs a step, and a round may have none
        self.entered: set[int] = set()

    @rule(seed=SEEDS)
    def go_on(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(4):
            self.run(rng)

    @rule(seed=SEEDS, fails_at=st.integers(1, 600), lasting=st.booleans())
    def memory_runs_out(self, seed: int, fails_at: int, lasting: bool) -> None:
        """`RoundDriver` checks that each row that was not dropped is where the plan wanted it."""
        rng = random.Random(seed)
        with FailingAllocations(self.engine, fails_at, lasting=lasting) as failing:
            for _ in range(3):
                self.run(rng)
                failing.stop_failing()

    @rule(
        numbers=st.sets(st.sampled_from(range(len(ROWS))), min_size=1, max_size=3),
        steps=st.integers(1, 9),
    )
    def a_slice_runs_between(self, numbers: set[int], steps: int) -> None:
        output = run_slice(
            self.engine, [ROWS[number] for number in numbers], steps, lambda step: True
        )
        assert list(output.tokens) == [alone()[number][:steps] for number in numbers]

    @precondition(lambda self: self.driver.having(RUNS, PAUSED, SWAPPED))
    @rule()
    def all_leave(self) -> None:
        self.driver.run(0, evict=tuple(self.driver.having(RUNS, PAUSED, SWAPPED)))
        self.check()
        assert self.engine.ledger.used_bytes == kept_bytes(self.engine)
        assert self.engine.host_ledger.used_bytes == 0

    def run(self, rng: random.Random) -> None:
        """A round of any moves."""
        driver = self.driver
        moves = {move: [] for move in ("evict", "pause", "swap_out", "swap_in", "resume")}
        for state, ways in WAYS.items():
            for number in driver.having(state):
                for move in rng.choice(ways):
                    moves[move].append(number)
        enter = [number for number in driver.having(WAITS) if rng.random() < 0.3]
        self.entered.update(enter)
        driver.stop_after = rng.choice([None, None, 1, 3])
        named = {move: tuple(numbers) for move, numbers in moves.items()}
        driver.run(
            rng.choice([0, 1, 2, 4, 8]),
            enter=enter,
            overlap=rng.random() < 0.5,
            stop_every=rng.randint(1, 3),
            **named,
        )
        self.check()

    def check(self) -> None:
        engine = self.engine
        driver = self.driver
        assert engine.ledger.peak_bytes <= engine.facts.kv_budget_bytes
        assert bool(engine.ledger.used_bytes) >= bool(driver.whole and driver.having(RUNS, PAUSED))
        if not driver.having(RUNS, PAUSED):
            assert engine.ledger.used_bytes == kept_bytes(engine)
        if driver.whole:
            held = sum(len(driver.as_row(number).tokens) - 1 for number in driver.having(SWAPPED))
            assert engine.host_ledger.used_bytes == held * engine.facts.kv_bytes_per_token
        for number, got in enumerate(driver.got):
            assert tuple(got) == alone()[number][: len(got)]

    def teardown(self) -> None:
        driver = self.driver
        driver.stop_after = None
        for number in set(range(len(ROWS))) - self.entered:
            driver.state[number] = DONE
        got = driver.finish()
        assert [got[number] for number in self.entered] == [
            alone()[number] for number in self.entered
        ]
        assert self.engine.ledger.used_bytes == kept_bytes(self.engine)
        assert self.engine.host_ledger.used_bytes == 0


TestRounds = Rounds.TestCase
TestRounds.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
