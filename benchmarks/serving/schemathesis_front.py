"""Requests that schemathesis makes of a server's document: no 5xx, no error in another form.

    python -m benchmarks.serving.schemathesis_front --with OTHER/bin/st

OTHER is an environment of its own (`python -m venv OTHER && OTHER/bin/pip install schemathesis`).
FastAPI makes the document of the application's routes. Bodies are read by msgspec, which gives
their schemas: of our own engines strictly, before replicas the fields that a front understands. The
servers are one of our own with fake engines, and one before two stand-ins. Takes some minutes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks.common.command import make_parser
from benchmarks.common.fronts import front_on
from benchmarks.common.serving import fake_server
from benchmarks.common.standin import MODEL, StandIn
from toolkit.openai.engine_requests import EngineChat, EngineCompletion
from toolkit.openai.requests import CHAT, COMPLETIONS, RESPONSES, RequestFields
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import make_router
from toolkit.routing.types import ReplicaTraits
from toolkit.server.application import Application
from toolkit.server.options import ServerOptions
from toolkit.server.pool import PoolBackend
from toolkit.server.process import url
from toolkit.server.replicas import ReplicaNeeds, ReplicaPool

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "unsupported_method",
)  # fmt: skip
SHARED = ("/v1/models", "/health", "/ready", "/version", "/metrics", COMPLETIONS, CHAT)
TEXT_OR_NULL = {"type": ["string", "null"]}
NUMBER_OR_NULL = {"type": ["integer", "null"]}
RESPONSE = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": TEXT_OR_NULL,
        "input": {"type": ["string", "array"]},
        "stream": {"type": ["boolean", "null"]},
        "max_output_tokens": NUMBER_OR_NULL,
        "priority": NUMBER_OR_NULL,
        "background": {"type": ["boolean", "null"]},
        "previous_response_id": TEXT_OR_NULL,
    },
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT_OR_NULL,
                "code": TEXT_OR_NULL,
            },
        }
    },
}


def document(*, own: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a server of our engines, or of one before replicas."""
    pool = ReplicaPool(
        Balancer(make_router("round-robin", {}), []), ReplicaTraits(1), ReplicaNeeds(), hang_s=1.0
    )
    options = ServerOptions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # HEAD and GET of a page share its name
        made: dict[str, Any] = Application(PoolBackend(pool, options), options)._routes.openapi()
    kinds: dict[str, type] = {COMPLETIONS: RequestFields, CHAT: RequestFields}
    for path in (*kinds, RESPONSES):  # the backend answers these; FastAPI does not describe them
        made["paths"].setdefault(path, {"post": {}})
    if own:
        kinds = {COMPLETIONS: EngineCompletion, CHAT: EngineChat}
        made["paths"] = {path: made["paths"][path] for path in SHARED}
    place = "#/components/schemas/{name}"
    schemas, parts = msgspec.json.schema_components(list(kinds.values()), ref_template=place)
    for part in parts.values():
        part.get("properties", {}).pop("timeout", None)  # a short one gets its 504
    made["components"] = {"schemas": parts}
    error = ERROR if own else {"type": "object", "required": ["error"]}  # a replica's own, too
    errors = {"description": "refused", "content": {"application/json": {"schema": error}}}
    for path in made["paths"].values():
        for operation in path.values():
            operation["responses"] = {"200": {"description": "answered"}, "4XX": errors}
    for path, schema in zip(kinds, schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        made["paths"][path]["post"]["requestBody"] = body
    if not own:
        body = {"required": True, "content": {"application/json": {"schema": RESPONSE}}}
        made["paths"][RESPONSES]["post"]["requestBody"] = body
    return made


def asked(program: str, address: str, examples: int, *, own: bool) -> bool:
    """Ask a server. Return whether schemathesis found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document(own=own)), encoding="utf-8")
        words = [program, "run", str(file), "--url", address, "--checks", ",".join(CHECKS)]
        words += ["--max-examples", str(examples), "--seed", "1", "--continue-on-failure"]
        words += ["--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing"]
        return subprocess.run(words, cwd=folder, check=False).returncode == 0


async def before_replicas(program: str, examples: int) -> bool:
    """Ask a server before two stand-ins."""
    replicas = [StandIn(), StandIn()]
    for one in replicas:
        await one.start()
    urls = [one.url for one in replicas]
    async with front_on(urls, MODEL, "least-requests", ServerOptions(), hang_s=5.0) as front:
        pool, listener = front
        while len(pool.up) < len(replicas):
            await asyncio.sleep(0.01)
        found = await asyncio.to_thread(asked, program, url(listener), examples, own=False)
    for one in replicas:
        one.kill()
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--with", dest="program", required=True, metavar="ST", help="schemathesis")
    parser.add_argument("--examples", type=int, default=200, help="of each operation")
    options = parser.parse_args()
    with fake_server() as server:
        fine = asked(options.program, server.url, options.examples, own=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        fine &= runner.run(before_replicas(options.program, options.examples))
    if not fine:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
