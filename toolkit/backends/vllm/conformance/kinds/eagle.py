"""Drafts that a layer makes from the model's states: EAGLE, and MTP of one module."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.drafted import kind_of

# from 0.33 on, the hash of a block covers the token behind it
KIND = kind_of("eagle", 21, before="0.33")
