"""The settings of the front that do not come from the plan: names, limits, keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.files.keys import ApiKey

MAX_BODY_BYTES = 8 << 20


@dataclass(slots=True, frozen=True)
class FrontSettings:
    """The front's settings. Lengths are in tokens."""

    model: str  # the name by which clients call it
    max_model_len: int  # of prompt and output together
    vocab_size: int
    max_new_tokens: int  # that one request may ask for
    max_waiting: int  # requests; with more, new ones get 503
    # Without the one key and without keys with limits of their own, everything is open.
    api_key: str = ""
    keys: tuple[ApiKey, ...] = ()
    open_metrics: bool = False  # /metrics needs no key
    allow_end_after: bool = False  # requests may set `llmctl_end_after`
    vllm_metrics: bool = False  # metrics also under vLLM's names
    status_page: bool = False
    local_hosts_only: bool = False  # a Host that is another name than localhost gets 403
    max_body_bytes: int = MAX_BODY_BYTES
    keepalive_s: float = 10.0  # an idle stream gets a comment after this long
    # The deadline of requests that set none, and the longest that a request may set.
    request_timeout_s: float = math.inf

    @property
    def asks_key(self) -> bool:
        return bool(self.api_key or self.keys)
