"""What one server is told, in one object: the command line makes it, every part of the server reads
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.profile import OnForeign
from toolkit.routing.types import BLOCK_TOKENS
from toolkit.server.access import Keys, read_keys
from toolkit.server.watched import Watched, watched_file

MAX_BODY_BYTES = 8 << 20


def one_key(key: str = "") -> Watched[Keys]:
    """Return the keys of a server with one key; '': it asks for none."""
    return Watched((key,) if key else ())


def model_name(plan: Plan) -> str:
    """The default name by which clients call the model."""
    recipe = plan.recipe
    return recipe.serve.served_model_name or (
        recipe.name if recipe.model.source == "random" else recipe.model.source
    )


def find_keys(key: str, file: Path | None) -> Watched[Keys]:
    """Return the API key, or the keys of a file, which may change while the server runs.

    Raises InputError if both are given, and for a file without a key.
    """
    if file is None:
        return one_key(key.strip())
    if key:
        raise InputError(
            "the API key is given twice",
            "keep one of --api-key-file and --api-key or LLMCTL_API_KEY",
        )
    return watched_file(file, read_keys)


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerOptions:
    """Lengths are in tokens, times in seconds.

    Attributes:
        model: the name by which clients call it; before replicas '' is any.
        keys: without any key the server is open.
        insecure: it may be open to other machines.
        certificate: a PEM file; with it the server speaks TLS.
        certificate_key: None: it is in the certificate's file.
        max_new_tokens: that one request may ask for; before replicas, assumed for a request that
            names no limit.
        max_waiting: requests; with more, new ones get 503.
        request_timeout_s: the deadline of requests that set none, and the longest that one may set.
        admission: "targets" or "queue"; '': the recipe's.
        allow_end_after: requests may set `llmctl_end_after`.
        keepalive_s: an idle stream gets a comment after this long.
        wait_up_s: an accepted request waits this long for a replica to be up.
        notice_s: after the signal, requests are accepted for this long.
        timeout_s: after that, running requests have this long to end.
        pass_log, control_key: of an engine that is a server itself.
        ray: the Ray cluster of the workers (`toolkit.cluster.connect.joined` lists the values); '':
            this machine.
        replicas: the URLs of those that run already; None: what is served is started.
        replica_key: is sent to these; '': none.
        router: of replicas; '': there are none.
        block_tokens: of the blocks by which what prompts share is logged; 0: it is not.
        on_foreign: is called if the engine is not the fitted one; None: it is refused.
        say: prints what an operator should read.
    """

    model: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    keys: Watched[Keys] = field(default_factory=one_key, compare=False)
    insecure: bool = False
    certificate: Path | None = None
    certificate_key: Path | None = None
    status_page: bool = False
    max_new_tokens: int = 256
    max_waiting: int = 4096
    max_body_bytes: int = MAX_BODY_BYTES
    request_timeout_s: float = math.inf
    admission: str = ""
    allow_end_after: bool = False
    keepalive_s: float = 10.0
    wait_up_s: float = 60.0
    notice_s: float = 0.0
    timeout_s: float = 30.0
    event_log: Path | None = None
    pass_log: Path | None = None
    request_log: Path | None = None
    control_key: str = ""
    ray: str = ""
    replicas: Watched[list[str]] | None = None
    replica_key: str = ""
    router: str = ""
    block_tokens: int = BLOCK_TOKENS
    on_foreign: OnForeign | None = None
    say: Callable[[str], None] = field(default=lambda _: None, compare=False)

    @property
    def api_key(self) -> str:
        """The first key; '': there is none."""
        return self.keys.value[0] if self.keys.value else ""

    @property
    def asks_key(self) -> bool:
        return bool(self.keys.value)
