"""Full attention and sliding windows with blocks of two sizes, as where heads have two sizes."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import kind_of, two_sizes

KIND = kind_of("block sizes", [two_sizes], ("windows", "block sizes"), 22)
