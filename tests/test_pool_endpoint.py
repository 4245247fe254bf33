"""What a stranger writes to add an endpoint before replicas: one line, here for /v1/embeddings."""

import json

import pytest
from test_pool import Front, behind
from test_pool_rogue import metric, page

from benchmarks.common.standin import MODEL, StandIn

EMBEDDINGS = "/v1/embeddings"
ASKED = {"model": MODEL, "input": ["Once", "upon"], "encoding_format": "float"}
ANSWER = {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "model": MODEL}


def embeds(path: str, body: dict[str, object]) -> bytes:
    assert (path, body) == (EMBEDDINGS, ASKED)
    return page(json.dumps(ANSWER).encode(), more=b"content-type: application/json\r\n")


@behind({"script": embeds}, api_key="secret")
async def test_an_endpoint_of_one_line_is_relayed_as_the_others_are(
    front: Front, servers: list[StandIn]
):
    front.app.generates(EMBEDDINGS)
    key = {"authorization": "Bearer secret"}
    answer = await front.http.post(EMBEDDINGS, json=ASKED, headers=key)
    assert (answer.status_code, answer.json()) == (200, ANSWER)
    assert (await front.http.post(EMBEDDINGS, json=ASKED)).status_code == 401
    other = await front.http.post(EMBEDDINGS, json=ASKED | {"model": "x"}, headers=key)
    assert other.json()["error"]["code"] == "model_not_found"
    front.http.headers.update(key)
    assert await metric(front, 'llmctl_requests_total{finish_reason="stop"') == 1


@pytest.mark.slow
@behind({"script": embeds}, {"script": embeds}, hang_s=0.3, router="round-robin")
async def test_it_goes_on_at_another_replica(front: Front, servers: list[StandIn]):
    front.app.generates(EMBEDDINGS)
    servers[0].script = lambda path, body: b""  # it says nothing
    for _ in range(4):
        assert (await front.http.post(EMBEDDINGS, json=ASKED)).json() == ANSWER
    assert sum(each.moved + each.failures for each in front.pool.replicas) > 0
