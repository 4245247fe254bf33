"""What a server is told, apart from the plan: names, limits, who may call."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.files.keys import ApiKey

MAX_BODY_BYTES = 8 << 20


@dataclass(slots=True, frozen=True)
class FrontSettings:
    """The front's settings. Lengths in tokens.

    `max_new_tokens` bounds what one request may ask for; `max_waiting` how many may wait before new
    ones get 503. `local_hosts_only`: a Host that is another name than localhost gets 403.
    `request_timeout_s`: the deadline of requests that name none, and the longest that one may name.
    Who may call has the `api_key`, or one of `keys`, which have limits of their own; with neither
    everything is open.
    """

    model: str
    max_model_len: int
    vocab_size: int
    max_new_tokens: int
    max_waiting: int
    api_key: str = ""
    keys: tuple[ApiKey, ...] = ()
    open_metrics: bool = False
    allow_end_after: bool = False
    vllm_metrics: bool = False
    status_page: bool = False
    local_hosts_only: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    keepalive_s: float = 10.0
    request_timeout_s: float = math.inf

    @property
    def asks_key(self) -> bool:
        return bool(self.api_key or self.keys)
