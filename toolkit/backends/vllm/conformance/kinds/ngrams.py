"""Drafts from n-grams of the text so far."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.drafted import kind_of

KIND = kind_of("ngram", 20)
