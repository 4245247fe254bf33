"""Full attention beside states (Mamba, linear attention), with prefix caching and without, with
states that are kept inside chunks and without. 0.30 and older choose ends of chunks otherwise.
"""

from __future__ import annotations

from toolkit.backends.vllm.conformance.groups import kind_of, states

KIND = kind_of("states", [states], ("states",), 23)
