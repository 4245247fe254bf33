"""Sliding windows in every layer, as in the first Mistral 7B."""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import kind_of, windows_alone

KIND = kind_of("window only", [windows_alone], ("window only",), 21)
