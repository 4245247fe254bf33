"""Speculative decoding: how many drafts are proposed, and how many the model accepts.

Acceptance depends on texts, which a simulation does not have, so that it is drawn (`DrawnDrafts`).
The scheduler (`toolkit.sim.vllm`) plans the passes with drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from toolkit.catalogue.classes import DRAFTING
from toolkit.errors import InputError, nearest
from toolkit.files.recipe import AcceptanceSpec

DRAWS: Final = 1_000_003  # a prime: requests begin at places of their own in the table of draws
APART: Final = 7_919  # places between two requests


@dataclass(slots=True, frozen=True)
class DrawnDrafts:
    """Speculative decoding.

    Attributes:
        method: one of `DRAFTING`.
        rates: of each position, the share of passes in which the draft there is accepted; none
            exceeds the one before it. As many as there are drafts.
        proposed: share of a row's passes with drafts; in the others none is proposed.
        seed: of the draws.
    """

    method: str
    rates: tuple[float, ...]
    proposed: float = 1.0
    seed: int = 0
    _proposals: bytes = field(init=False, repr=False, compare=False, default=b"")
    _table: bytes = field(init=False, repr=False, compare=False, default=b"")

    def __post_init__(self) -> None:
        if self.method not in DRAFTING:
            raise InputError(
                f"speculative decoding by '{self.method}' is not modelled",
                nearest(self.method, DRAFTING),
            )
        object.__setattr__(self, "_table", _drawn(self.rates, self.seed))
        if self.proposed < 1.0:
            object.__setattr__(self, "_proposals", _drawn((self.proposed,), self.seed + 1))

    @property
    def tokens(self) -> int:
        """Drafts of a row in a pass."""
        return len(self.rates)

    @property
    def uses_states(self) -> bool:
        """Whether drafting uses the model's states, as EAGLE and MTP do."""
        return DRAFTING[self.method]

    def offered(self, number: int, turn: int) -> int:
        """How many drafts are proposed for a request, when that is asked for time `turn`."""
        if self._proposals and not self._proposals[(number * APART + turn) % DRAWS]:
            return 0
        return self.tokens

    def accepted(self, number: int, turn: int) -> int:
        """How many of a request's drafts are accepted in its pass number `turn` with drafts."""
        return self._table[(number * APART + turn) % DRAWS]


@lru_cache(maxsize=16)
def _drawn(rates: tuple[float, ...], seed: int) -> bytes:
    """How many drafts are accepted, drawn `DRAWS` times."""
    drawn = np.random.default_rng(seed).random(DRAWS)
    accepted = sum((drawn < rate).astype(np.uint8) for rate in rates)
    return np.asarray(accepted, dtype=np.uint8).tobytes()


def chance_of_length(length: float, tokens: int) -> float:
    """Return the chance p that a draft is accepted if all before it are: with `tokens` drafts, a
    pass then gives `length` tokens on average, so that the sum of p^k over k = 1..tokens is
    `length` - 1. Raises InputError for a length outside 1 to `tokens` + 1.
    """
    if not 1.0 <= length <= tokens + 1:
        raise InputError(
            f"an acceptance length of {length:g} with {tokens} drafts",
            f"it is from 1, when none is accepted, to {tokens + 1}",
        )
    roots = np.roots([*[1.0] * tokens, 1.0 - length])  # one of them is real and not negative
    return min(float(roots.real[roots.imag == 0.0].max()), 1.0)


def drafts_of(
    method: str, tokens: int, acceptance: AcceptanceSpec | None, seed: int
) -> DrawnDrafts:
    """`tokens` drafts by a method of vLLM, accepted as the traffic's `acceptance` says.

    `InputError` without any, and for rates of fewer drafts.
    """
    if acceptance is None:
        raise InputError(
            f"{tokens} drafts of a row in a pass, and nothing says how many are accepted",
            "set serve.acceptance in the recipe, or give --set acceptance_length=TOKENS",
        )
    return DrawnDrafts(method, rates_of(acceptance, tokens), acceptance.proposed, seed)


def rates_of(acceptance: AcceptanceSpec, tokens: int) -> tuple[float, ...]:
    """The rate of each of `tokens` positions. `InputError` for rates of fewer drafts."""
    if acceptance.rates is None:
        assert acceptance.length is not None
        chance = chance_of_length(acceptance.length, acceptance.tokens or tokens)
        return tuple(chance**k for k in range(1, tokens + 1))
    if len(acceptance.rates) < tokens:
        raise InputError(
            f"serve.acceptance has rates of {len(acceptance.rates)} drafts, and {tokens} are used",
            "give a rate for each position, or `length`",
        )
    return tuple(acceptance.rates[:tokens])
