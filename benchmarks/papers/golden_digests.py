"""The digests of `tests/test_golden_digests.py` with more requests: whether two versions make
the same decisions.

    python -m benchmarks.papers.golden_digests --write before.json     # in one version
    python -m benchmarks.papers.golden_digests --against before.json   # in the other

Takes about two minutes on one core with `--scale 10`, the default: ten times the requests of the
test. Needs nothing else. Names each case that differs.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

from benchmarks.common.command import make_parser
from benchmarks.common.golden import REQUESTS, VARIANT_REQUESTS, WORKERS, digest, matrix, variants


def main() -> int:
    parser = make_parser(__doc__)
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
