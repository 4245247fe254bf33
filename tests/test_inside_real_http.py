"""Our scheduler inside a real vLLM server: OpenAI's client gets vLLM's own answers, for each
policy.

The test runs if vLLM is installed or VLLM_PYTHON names the Python of an environment that has it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import samples
from real_vllm import differences, needed, recipe

from toolkit.backends.vllm.command import VllmCommand, VllmServer, vllm_server
from toolkit.engines.saved import saved_model
from toolkit.files.io import write_file

pytestmark = [needed, pytest.mark.slow]
POLICIES = {
    "past-future": [],
    "past-future-sla mtpot_s=0.5 ttft_s=5": [],
    "aggressive watermark=1.0": [],
    "conservative": [],
    "fcfs max_batch_size=3": [],
    "slice-continuous slice_tokens=16": [],
    "mlfq quantum_s=0.02 max_batch_size=4 interval_steps=4": [
        "--no-async-scheduling",
        "--max-num-seqs",
        "5",
    ],
}
SHAPES = [
    (20 + 37 * k % 80, 20 + 53 * k % 110) for k in range(16)
]  # 3.5 times what the cache holds


@contextmanager
def serving(flags: list[str], variables: dict[str, str]) -> Iterator[VllmServer]:
    asked = recipe()
    model = saved_model(asked.model, asked.hardware)
    flags = ["--no-enable-prefix-caching", "--shutdown-timeout", "30", *flags]
    with vllm_server(VllmCommand(asked, model, "toy", flags, variables), quiet=True) as server:
        yield server


class Client:
    """Requests completions of made-up prompts with the longest outputs."""

    def __init__(self, openai: Any) -> None:
        self._ask = openai.completions.create

    async def ask(self, k: int, **how):
        prompt_tokens, tokens = SHAPES[k]
        prompt = [(7 * k + 3 * at + at * at) % 256 for at in range(prompt_tokens)]
        more = {"ignore_eos": True, "return_token_ids": True}
        given = {
            "model": "toy",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "extra_body": more,
        }
        return await self._ask(**given | how)

    async def whole(self, k: int, **how):
        choices = (await self.ask(k, **how)).choices
        return [(one.token_ids, one.finish_reason, one.text) for one in choices]

    async def streamed(self, k: int):
        tokens = []
        text = ""
        reason = None
        async for chunk in await self.ask(k, stream=True):
            for one in chunk.choices:
                tokens += one.token_ids
                text += one.text
                reason = one.finish_reason or reason
        return [(tokens, reason, text)]

    async def cancelled(self, k: int, after: int):
        stream = await self.ask(k, stream=True)
        for _ in range(after):
            await anext(stream)
        await stream.close()

    async def impatient(self, k: int):
        with suppress(TimeoutError):
            await asyncio.wait_for(self.whole(k), 0.05)

    async def scored(self, k: int):
        (one,) = (await self.ask(k, logprobs=2)).choices
        return one.logprobs.token_logprobs

    async def everything(self, stop: str | None):
        """All requests at once, answers by request. `stop` is a text within the third answer, which
        is searched there if it is None.
        """
        asked = {k: self.streamed(k) if k % 2 else self.whole(k) for k in range(16)}
        asked |= {f"two of {k}": self.whole(k, n=2, temperature=1.0, seed=3) for k in (4, 9)}
        asked |= {"scores": self.scored(2)}
        others = [self.cancelled(3, 3), self.cancelled(8, 1), self.impatient(5), self.impatient(6)]
        answers = await asyncio.gather(*asked.values(), *others)
        found = dict(zip(asked, answers, strict=False))
        text = found[2][0][2]
        found["stop"] = stop or next(
            text[at : at + 2] for at in range(8, len(text)) if text[at : at + 2].isascii()
        )
        found["stopped"] = await self.whole(2, stop=[found["stop"]])
        return found

    async def running(self, server: VllmServer) -> list[int]:
        """Tokens of three requests that run when the server is told to end."""
        streams = [await self.ask(0, stream=True, max_tokens=60) for _ in range(3)]
        counts = [await self._tokens(stream, 1) for stream in streams]
        server.terminate()
        rest = await asyncio.gather(*(self._tokens(stream, 60) for stream in streams))
        return [one + other for one, other in zip(counts, rest, strict=True)]

    @staticmethod
    async def _tokens(stream, most: int) -> int:
        """The number of tokens that come next, up to about `most`."""
        count = 0
        async for chunk in stream:
            count += sum(len(one.token_ids) for one in chunk.choices)
            if count >= most:
                break
        return count


async def talk(server: VllmServer, stop: str | None):
    """The answers of all requests, and the tokens of those that run when the server ends."""
    from openai import AsyncOpenAI  # here: it takes half a second, and only slow tests need it

    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120
    ) as openai:
        client = Client(openai)
        return await client.everything(stop), await client.running(server)


@pytest.fixture(scope="module")
def own():
    with serving([], {}) as server:
        return asyncio.run(talk(server, None))[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_clients_get_the_answers_of_vllm_itself(policy: str, own, tmp_path: Path):
    write_file(samples.fit(), tmp_path / "fit.json")
    log = tmp_path / "events.jsonl"
    variables = {"LLMCTL_VLLM_POLICY": policy, "LLMCTL_VLLM_FIT": str(tmp_path / "fit.json")}
    scheduler = ["--scheduler-cls", "toolkit.backends.vllm.scheduler.LlmctlScheduler"]
    with serving(
        [*scheduler, *POLICIES[policy]], variables | {"LLMCTL_VLLM_EVENT_LOG": str(log)}
    ) as server:
        found, drained = asyncio.run(talk(server, own["stop"]))
        code = server.wait(120)  # on a busy machine vLLM takes all of its time
    assert found.pop("scores") == pytest.approx(own["scores"], abs=1e-4)
    assert found == {name: answer for name, answer in own.items() if name != "scores"}
    assert found["stopped"][0][1] == "stop"
    assert drained == [60, 60, 60]
    assert code == 0
    assert differences(log, variables) == []
