"""Live settings of a real vLLM: no request is lost, and the simulator makes the same passes.

The tests need vLLM, or VLLM_PYTHON as the Python of an environment that has it.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_vllm import PYTHON, needed

from benchmarks.engines import vllm_passes, workloads
from toolkit.backends.vllm.command import VllmCommand, flags_of, vllm_server
from toolkit.backends.vllm.conformance.modelled import differs
from toolkit.backends.vllm.conformance.run import run_cases
from toolkit.backends.vllm.control import MIDDLEWARE
from toolkit.backends.vllm.from_log import read_passes
from toolkit.backends.vllm.setup import CONTROL_VARIABLE, ITERATIONS_VARIABLE, PYTHON_VARIABLE
from toolkit.endpoints.settings import LiveSetting, SettingsClient
from toolkit.engines.saved import saved_model
from toolkit.files.shipped import load_recipe
from toolkit.sched.policies.parameters import Value

pytestmark = [needed, pytest.mark.slow]
KEY = "of this test"
LOGGED = "toolkit.backends.vllm.iterations.logged_scheduler"
FLAGS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
LONGEST = 512  # tokens of a request, and the size of the vocabulary
CHANGES = 40
AT_ONCE = 12
Texts = list[str]


def test_vllm_s_schedulers_take_new_settings_as_the_simulator_does() -> None:
    cases = [workloads.make("live settings", seed, seed % 2 == 1) for seed in range(5000, 5060)]
    theirs = run_cases(PYTHON, cases).passes()
    differ = [differs(case, found) for case, found in zip(cases, theirs, strict=True)]
    assert differ == [None] * len(cases)


def test_no_request_is_lost_or_changed_while_settings_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same greedy requests by two servers, the second one under changes; its log of passes is
    followed by the simulator, with the same changes at the same passes.
    """
    monkeypatch.setenv(PYTHON_VARIABLE, PYTHON)
    recipe = load_recipe("tiny-llama-vllm")
    requests = drawn_requests(60, random.Random(1))
    flags = [*flags_of("vllm", FLAGS), "--scheduler-cls", LOGGED, "--middleware", MIDDLEWARE]
    log = tmp_path / "passes.jsonl"
    variables = {ITERATIONS_VARIABLE: str(log), CONTROL_VARIABLE: KEY}
    model = saved_model(recipe.model, recipe.hardware)
    command = VllmCommand(recipe, model, recipe.name, flags, variables)
    with vllm_server(command, quiet=True) as server:
        usual = asyncio.run(served(server.url, recipe.name, requests))
    with vllm_server(command, quiet=True) as server:
        for texts in asyncio.run(disturbed(server.url, recipe.name, requests)):
            assert texts == usual
    history = read_passes(log)
    passes = history.passes
    asked = [
        {
            "id": arrival.request_id,
            "arrival_s": one.start_s,
            "prompt_tokens": arrival.prompt_tokens,
            "max_tokens": arrival.max_new_tokens,
        }
        for one in passes
        for arrival in one.arrived
    ]
    assert len(passes) > 100
    ours = vllm_passes.passes_of_log(history.header, asked, passes)
    assert ours == vllm_passes.logged(passes, asked)


def drawn_requests(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Prompts of random tokens, and outputs of a given length."""
    found = []
    for _ in range(count):
        prompt = draw.choice([draw.randint(4, 60), draw.randint(60, 380)])
        output = min(draw.choice([draw.randint(1, 20), draw.randint(20, 110)]), LONGEST - prompt)
        tokens = [draw.randrange(3, LONGEST) for _ in range(prompt)]
        found.append({"prompt": tokens, "max_tokens": output})
    return found


async def served(url: str, model: str, requests: list[dict[str, Any]]) -> Texts:
    """The text of each request; some are served at once."""
    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:

        async def ask(request: dict[str, Any]) -> str:
            fields = {"model": model, "temperature": 0.0, "ignore_eos": True}
            async with room:
                answer = await client.post(f"{url}/v1/completions", json=fields | request)
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        return await asyncio.gather(*map(ask, requests))


async def disturbed(url: str, model: str, requests: list[dict[str, Any]]) -> list[Texts]:
    """The texts while settings change, as often as the requests are sent until all are made."""
    changing = asyncio.create_task(change(SettingsClient(url, KEY)))
    found = [await served(url, model, requests)]
    while not changing.done():
        found.append(await served(url, model, requests))
    await changing
    return found


async def change(control: SettingsClient) -> None:
    """Draw one to three settings anew, again and again; in the end all are those of the start."""
    draw = random.Random(1)
    state = await asyncio.to_thread(control.get)
    for _ in range(CHANGES):
        some = draw.sample(state.settings, draw.randint(1, 3))
        await asyncio.to_thread(control.set, {one.name: drawn(one, draw) for one in some}, "drawn")
        await asyncio.sleep(0.02)
    await asyncio.to_thread(control.set, {one.name: one.start for one in state.settings})


def drawn(setting: LiveSetting, draw: random.Random) -> Value:
    """A value of a setting within its bounds."""
    if setting.choices:
        return draw.choice(setting.choices)
    if not isinstance(setting.start, int):
        return round(draw.uniform(0.0, 0.5), 3)
    low, high = int(setting.low or 0), int(setting.high or 0)
    return draw.choice([low, high, draw.randint(low, high)])
