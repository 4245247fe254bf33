"""The scheduler decides, and the simulator times, exactly as when these digests were taken.

    PYTHONPATH=. python tests/test_golden_digests.py          # takes them anew: where a decision
    was meant to change

A larger matrix is in `benchmarks/papers/golden_digests.py`.
"""

import json
from functools import cache
from pathlib import Path

import pytest

from benchmarks.common.golden import REQUESTS, VARIANT_REQUESTS, digest, matrix, variants

DIGESTS = Path(__file__).parent / "data" / "golden-digests.json"


PARTS = 68  # of the cases, each a test that takes a tenth of a second


@cache
def all_cases():
    return [*matrix(REQUESTS), *variants(VARIANT_REQUESTS)]


@pytest.fixture(scope="module")
def taken() -> dict[str, str]:
    return json.loads(DIGESTS.read_text())


def test_every_case_has_a_digest_and_its_own_name(taken):
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert set(names) == taken.keys()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_decisions_and_times_are_as_they_were(taken, part):
    differ = [case.name for case in all_cases()[part::PARTS] if digest(case) != taken[case.name]]
    assert not differ


if __name__ == "__main__":
    DIGESTS.write_text(
        json.dumps({case.name: digest(case) for case in all_cases()}, indent=0) + "\n"
    )
