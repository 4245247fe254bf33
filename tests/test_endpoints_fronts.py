"""What a front adds to requests, told from the passes that its engine logged."""

import numpy as np
import pytest

from toolkit.endpoints.fronts import front_seconds, names_of
from toolkit.endpoints.load import Sample
from toolkit.files.iterations import LoggedPass, LoggedRow

IN_S = 0.003
OUT_S = 0.002
PASS_S = 0.02


def served(rng: np.random.Generator, count: int = 200, start_s: float = 50.0):
    """Requests of three tokens that come at random to an engine that is always busy."""
    samples = [Sample(0.0, 8, 3, sent_s=sent_s, failure="") for sent_s in rng.uniform(1, 9, count)]
    names = names_of(samples)
    busy = LoggedRow("cmpl-other-0-x", 9, 1, 8)
    passes = []
    left = {}
    waiting = sorted(zip(samples, names, strict=True), key=lambda pair: pair[0].sent_s)
    now_s = 0.0
    while waiting or left:
        while waiting and waiting[0][0].sent_s + IN_S <= now_s:
            sample, name = waiting.pop(0)
            left[name] = [sample, 0]
        rows = [busy]
        for name, (_, tokens) in left.items():
            request_id = f"cmpl-{name}-0-abc"
            computed, new = (0, 8) if not tokens else (7 + tokens, 1)
            rows.append(LoggedRow(request_id, computed, new, 8))
        end_s = now_s + PASS_S
        ended = []
        for name, row in list(left.items()):
            if not row[1]:
                row[0].first_token_s = end_s + OUT_S
            row[1] += 1
            if row[1] == 3:
                ended.append(f"cmpl-{name}-0-abc")
                del left[name]
        passes.append(one(start_s + now_s, start_s + end_s, rows, ended))
        now_s = end_s
    return samples, names, passes


def one(start_s: float, end_s: float, rows: list[LoggedRow], ended: list[str], waiting: int = 0):
    rest = {"preempted": [], "waiting": waiting, "free_blocks": 9, "step": 1}
    return LoggedPass(start_s=start_s, end_s=end_s, rows=rows, ended=ended, **rest)


def test_the_time_on_both_ways_is_right_in_the_mean():
    samples, names, passes = served(np.random.default_rng(0))
    found = front_seconds(samples, names, passes, 50.0)
    assert len(found) == len(samples)
    assert np.mean(found) == pytest.approx(IN_S + OUT_S, abs=1.2e-3)


def test_an_idle_engine_takes_a_request_as_it_comes():
    sample = Sample(0.0, 8, 1, sent_s=1.0, first_token_s=1.1, failure="")
    early = one(0.0, 0.5, [LoggedRow("cmpl-x-0-y", 0, 8, 8)], ["cmpl-x-0-y"])
    its = one(1.004, 1.09, [LoggedRow("cmpl-llmctl0-0-y", 0, 8, 8)], ["cmpl-llmctl0-0-y"])
    found = front_seconds([sample], names_of([sample]), [early, its], 0.0)
    assert found == [pytest.approx(0.004 + 0.01)]


def test_a_request_that_may_have_waited_for_room_is_left_out():
    sample = Sample(0.0, 8, 1, sent_s=1.0, first_token_s=1.1, failure="")
    full = one(0.9, 1.0, [LoggedRow("cmpl-x-0-y", 9, 1, 8)], [], waiting=1)
    its = one(1.0, 1.09, [LoggedRow("cmpl-llmctl0-0-y", 0, 8, 8)], [])
    assert front_seconds([sample], names_of([sample]), [full, its], 0.0) == []
