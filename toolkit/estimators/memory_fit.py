"""From memory probes to a memory law: one zeta where it explains them (SCLS paper, Eq. 9), else rules (Algorithm 2).

A probe brackets the edge: N rows ran, M > N rows did not. In shares of the capacity, N * (L + S) / capacity, that is an
interval; zeta is where the intervals meet. Beyond the paper, and only where that fails: a prefill's activations, which
take memory in proportion to N * L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.stats import norm

from toolkit.errors import InputError
from toolkit.estimators.held_out import Floats
from toolkit.files.fit import MemoryFit, Rule
from toolkit.files.profile import EngineFacts, MemoryPoint

SLACK = 0.05  # of the edge: the rules' steps, between two probed lengths, waste more than that
WORKSPACES = np.linspace(0.0, 16.0, 321)
UNIFORM_STD = 12**-0.5  # of a uniform distribution of width 1: all that a bracket says of what lies inside


@dataclass(slots=True, frozen=True)
class _Probes:
    """The probes as arrays [n]; `failed` is infinite where the edge was not reached."""

    length: Floats
    steps: Floats
    ran: Floats
    failed: Floats

    def shares(self, workspace: float, capacity: int) -> tuple[Floats, Floats, Floats]:
        """What one row takes of the capacity, and the interval [low, high) in which the edge lies."""
        row = (self.length * (1.0 + workspace) + self.steps) / capacity
        return row, self.ran * row, self.failed * row


def fit_memory(probes: Sequence[MemoryPoint], engine: EngineFacts) -> MemoryFit:
    """The memory law that the probes show: zeta alone, zeta with a prefill's workspace, or rules.

    The first that explains them is taken: that is off by at most one row or 5 % everywhere. Raises `InputError`
    without probes, where one contradicts itself, or where not even one row ever ran. A server is not probed: its
    capacity is what it says.
    """
    if engine.is_server:
        return MemoryFit(
            form="zeta",
            capacity_tokens=engine.capacity_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            zeta=1.0,
            zeta_std=0.0,
        )
    _check(probes)
    found = _Probes(
        length=np.array([probe.input_length for probe in probes], dtype=float),
        steps=np.array([probe.steps for probe in probes], dtype=float),
        ran=np.array([probe.largest_ok for probe in probes], dtype=float),
        failed=np.array([np.inf if p.smallest_oom is None else p.smallest_oom for p in probes]),
    )
    capacity = engine.capacity_tokens
    for workspace in (0.0, _likeliest_workspace(found, capacity)):
        row, low, high = found.shares(workspace, capacity)
        slack = np.maximum(row, SLACK * np.median(low))
        explained = np.max(low - slack) < np.min(high + slack)
        if explained:
            break
    rules = [] if explained else _rules(found.length + found.steps, found.ran, engine.max_model_len)
    zeta, std = _edge(low, high)
    return MemoryFit(
        form="zeta" if explained else "rules",
        capacity_tokens=capacity,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        zeta=zeta,
        zeta_std=std if explained else _bracket_std(found.ran, found.failed),
        workspace=workspace if explained else 0.0,
        rules=rules,
    )


def _likeliest_workspace(found: _Probes, capacity: int) -> float:
    """The workspace under which the probes' intervals overlap most, or miss one another least."""

    def gap(workspace: float) -> float:
        _, low, high = found.shares(workspace, capacity)
        return float(low.max() / high.min())

    return float(min(WORKSPACES, key=gap))


def _edge(low: Floats, high: Floats) -> tuple[float, float]:
    """Mean and standard deviation of an edge that lies in each [low, high), in shares of the capacity.

    Where all intervals meet, the edge is in what they share. Where they do not, it differs from length to length, and
    its likeliest normal distribution is taken. Where no probe ran out, it is known only to be beyond the largest.
    """
    if np.all(np.isinf(high)):
        return float(low.max()), 0.0
    shared_low, shared_high = float(low.max()), float(high.min())
    if shared_low < shared_high:
        return (shared_low + shared_high) / 2, (shared_high - shared_low) * UNIFORM_STD
    middle = np.where(np.isinf(high), low, (low + high) / 2)

    def unlikelihood(at: Floats) -> float:
        mean, std = at[0], np.exp(at[1])
        inside = norm.cdf(high, mean, std) - norm.cdf(low, mean, std)
        return float(-np.log(np.maximum(inside, 1e-300)).sum())

    start = np.array([middle.mean(), np.log(middle.std() + 1e-3)])
    found = minimize(unlikelihood, start, method="Nelder-Mead")
    return float(found.x[0]), float(np.exp(found.x[1]))


def _rules(totals: Floats, ran: Floats, max_model_len: int) -> list[Rule]:
    """Algorithm 2's table: up to each probed L + S, as many rows as ran there, and never more than at a shorter one.

    Beyond the longest probe, rows shrink as if the tokens that fitted there were all there is.
    """
    order = np.lexsort((ran, totals))
    totals, limits = totals[order], np.minimum.accumulate(ran[order])
    bounds = [0, *totals[:-1].astype(int).tolist()]
    rules: list[Rule] = []
    for bound, limit in zip(bounds, limits.astype(int).tolist(), strict=True):
        if not rules or rules[-1].max_batch_size != limit:
            rules.append(Rule(length_above=bound, max_batch_size=limit))
    longest = int(totals[-1])
    if longest < max_model_len:
        rules.append(Rule(length_above=longest, max_batch_size=int(limits[-1] * longest / max_model_len)))
    return rules[::-1]


def _bracket_std(ran: Floats, failed: Floats) -> float:
    """How far, relative to the rule, a limit may lie from the batch size that ran: 0 where the next one failed."""
    known = np.isfinite(failed) & (ran > 0)
    return float(np.mean((failed[known] - 1 - ran[known]) / ran[known]) * UNIFORM_STD) if known.any() else 0.0


def _check(probes: Sequence[MemoryPoint]) -> None:
    remedy = "set profile.memory_lengths in the recipe; then: llmctl profile RECIPE"
    if not probes:
        raise InputError("memory: no length was probed, at least 1 is needed", remedy)
    for probe in probes:
        if probe.smallest_oom is not None and probe.smallest_oom <= probe.largest_ok:
            found = f"{probe.largest_ok} rows ran and {probe.smallest_oom} ran out of memory"
            raise InputError(f"memory at L={probe.input_length}: {found}", "measure again with: llmctl profile RECIPE")
    if all(probe.largest_ok == 0 for probe in probes):
        shortest = min(probe.input_length for probe in probes)
        raise InputError(f"memory: not even one row of {shortest} tokens ran", "give the engine more KV cache")
