"""Drafts that a layer makes from the model's states: EAGLE, and MTP of one module."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.drafted import kind_of

KIND = kind_of("eagle", 21)
