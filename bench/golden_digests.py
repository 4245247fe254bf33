"""The digests of `tests/test_golden_digests.py` with more requests: whether two versions decide
alike.

    python bench/golden_digests.py --write before.json      # in the version to compare with
    python bench/golden_digests.py --against before.json    # in the other: names each case that differs

`--scale` times as many requests as the test has. With 10, the default, one core takes about two
minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from golden import WORKERS, digest, matrix, variants
from test_golden_digests import REQUESTS, VARIANT_REQUESTS


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=int, default=10)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--against", type=Path)
    options = parser.parse_args()
    requests = {workers: options.scale * REQUESTS[workers] for workers in WORKERS}
    cases = chain(matrix(requests), variants(options.scale * VARIANT_REQUESTS))
    found = {case.name: digest(case) for case in cases}
    if options.write:
        options.write.write_text(json.dumps(found, indent=0) + "\n")
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())
    differ = sorted(name for name in {*found, *before} if found.get(name) != before.get(name))
    print("\n".join([*differ, f"{len(found):,} cases, {len(differ):,} differ"]))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
