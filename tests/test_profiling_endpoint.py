"""A server profiled from outside: how many requests it runs at once, its times, and what becomes of
failures.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import samples
from commands import llmctl
from said import says
from sse_server import chunked, serve_request, sse_server, tokens_event, usage_event, whole
from test_profiling_run import Watching

from benchmarks.common.serving import Server, fake_plan
from toolkit.backends.openai import EndpointBench, OpenaiBackend, kv_tokens
from toolkit.endpoints.load import Sample
from toolkit.endpoints.target import Metric
from toolkit.errors import EngineError, InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Settings
from toolkit.profiling.grid import GridPoint
from toolkit.profiling.process import Unmeasurable
from toolkit.profiling.run import profile

DECODE_S = 0.002
PREFILL = GridPoint("prefill", 1, 8)


def recipe_for(url: str, **engine: object) -> Recipe:
    return samples.recipe(
        engine={"name": "openai", "url": url, "kv_cache_memory_mib": 1.0} | engine,
        model={"source": "toy", "config": {}, "max_model_len": 128, "kv_bytes_per_token": 1024},
        workers=1,
        profile={
            "batch_sizes": [1, 2, 4],
            "input_lengths": [8, 16, 32],
            "cached_lengths": [16, 32, 64],
            "memory_lengths": [16],
            "repeats": 1,
            "slices": 6,
            "slice_tokens": [4],
        },
        policy={"name": "aggressive"},
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("endpoint")
    policy = Settings(policy="aggressive", parameters={})
    fake_plan(folder, policy, eos_one_in=0, decode_s=DECODE_S)
    with Server(folder / "plan.json", "--served-model-name", "toy") as running:
        yield running


@pytest.mark.slow
def test_a_server_is_profiled_and_fitted_like_an_engine(server: Server, tmp_path: Path):
    recipe = recipe_for(server.url)
    source = tmp_path / "recipe.yaml"
    source.write_text(recipe.model_dump_json(exclude_defaults=True))
    out = tmp_path / "profile.json"
    found = profile(recipe, source, out, Watching(), timed=OpenaiBackend().timed)
    assert (found.engine.engine, found.engine.capacity_tokens, found.engine.model_type) == (
        "openai",
        131_072,
        "toy",
    )
    assert found.engine.lacks == []
    assert found.engine.load_s is None, "it was loaded before"
    assert len(found.prefill) == 9
    # A client that stands still for some steps, on a machine with much else to do, may miss that
    # all rows decode.
    assert all("did not decode at once" in point.reason for point in found.failed)
    assert len(found.decode) + len(found.failed) == 9
    assert len(found.decode) >= 6
    assert len(found.slices) == 6
    assert min(min(point.seconds) for point in found.decode) > 0.0
    fitted = fit_profile(found, samples.HEAD)
    assert (fitted.memory.zeta, fitted.memory.zeta_std) == (1.0, 0.0)


def test_the_key_comes_from_the_environment_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMCTL_ENGINE_API_KEY", "canary")
    with sse_server() as stub, EndpointBench(recipe_for(stub.url)) as bench:
        pass
    assert all("authorization: Bearer canary" in head for head in stub.heads)
    assert "canary" not in bench.facts.model_dump_json()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_names_the_variable_of_the_engine_key(status: int):
    refused = whole({"error": {"message": "wrong key"}}, status)
    with sse_server(lambda body: refused) as stub, pytest.raises(InputError) as error:
        EndpointBench(recipe_for(stub.url))
    assert f"HTTP {status}: wrong key" in error.value.message
    assert says(error.value.hint, "LLMCTL_ENGINE_API_KEY")


def test_an_output_of_another_length_fails_the_point():
    def ends_early(body: dict) -> bytes:
        if "ignore_eos" in body:
            return whole({"message": "unexpected field"}, 400)
        count = 1 if body["max_tokens"] == 1 else body["max_tokens"] - 1
        return chunked(*[tokens_event()] * count, usage_event(count))

    with (
        sse_server(ends_early) as stub,
        pytest.raises(EngineError, match=r"47.*48"),
    ):
        EndpointBench(recipe_for(stub.url))


def test_a_server_that_does_not_stream_has_no_decode_steps():
    with (
        sse_server() as stub,  # all of an answer in one piece
        EndpointBench(recipe_for(stub.url)) as bench,
        pytest.raises(Unmeasurable, match="stream"),
    ):
        bench.time(GridPoint("decode", 1, 32), 0)


def one_after_the_other(prompts: Sequence[int], max_tokens: Sequence[int]) -> list[Sample]:
    """A server that prefills for a second each while the others decode, 0.125 s a step."""
    found = []
    for number, (prompt, tokens) in enumerate(zip(prompts, max_tokens, strict=True)):
        first_s = 1.0 + number
        last_s = first_s + 0.125 * (tokens - 1)
        found.append(Sample(0.0, prompt, tokens, 0.0, first_s, last_s, 0.125, tokens, ""))
    return found


def test_early_rows_get_more_tokens_until_all_decode_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[list[int]] = []

    def together(samples: Sequence[Sample]) -> list[Sample]:
        asked.append([sample.wanted_tokens for sample in samples])
        return one_after_the_other([sample.prompt_tokens for sample in samples], asked[-1])

    with sse_server() as stub, EndpointBench(recipe_for(stub.url)) as bench:
        monkeypatch.setattr(bench, "_together", together)
        assert bench.time(GridPoint("decode", 4, 32), warmups=1)[0] == pytest.approx(0.125)
        steps = 128 // 4
        assert asked[0] == [steps] * 4
        # 1.25 x 24, 16 and 8 steps of a lead
        assert asked[1] == [steps + 30, steps + 20, steps + 10, steps]
        assert asked[2] == asked[1], "what was found out once is kept"
        with pytest.raises(Unmeasurable, match="12 requests of 16"):
            bench.time(GridPoint("decode", 12, 32), warmups=0)


def test_points_fail_with_the_reason_until_the_profile_ends():
    broken = False

    def answer(body: dict) -> bytes:
        if broken:
            return whole({"error": {"message": "the GPU fell off"}}, 500)
        return serve_request(body)

    with sse_server(answer) as stub, EndpointBench(recipe_for(stub.url)) as bench:
        broken = True
        for _ in range(4):
            with pytest.raises(Unmeasurable, match="HTTP 500: the GPU fell off"):
                bench.time(PREFILL, 0)
        with pytest.raises(EngineError, match=r"5 points.*HTTP 500"):
            bench.time(PREFILL, 0)


def test_an_unknown_capacity_names_the_recipe_keys():
    with (
        sse_server() as stub,
        pytest.raises(InputError, match="KV cache") as error,
    ):
        EndpointBench(recipe_for(stub.url, kv_cache_memory_mib=None))
    assert "engine.kv_cache_memory_mib" in error.value.hint


@pytest.mark.parametrize(
    ("name", "labels", "value", "tokens"),
    [
        ("vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "100"}, 1.0, 1600),
        ("vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "None"}, 1.0, None),
        ("sglang:max_total_num_tokens", {}, 4096.0, 4096),
        ("llmctl_kv_cache_tokens", {}, 2048.0, 2048),
        ("process_open_fds", {}, 7.0, None),
    ],
)
def test_the_capacity_is_read_from_the_metrics_of_known_servers(
    name: str, labels: dict[str, str], value: float, tokens: int | None
):
    assert kv_tokens([Metric(name, labels, value)]) == tokens


def test_only_servers_have_an_address():
    with pytest.raises(ValueError, match=r"engine\.url"):
        samples.recipe(engine={"name": "openai"}, workers=1)
    with pytest.raises(ValueError, match="for engine 'openai'"):
        samples.recipe(engine={"name": "fake", "url": "http://127.0.0.1:1"})
    several = samples.recipe(engine={"name": "openai", "url": "http://127.0.0.1:1"}, workers=2)
    assert (several.workers, several.measured.workers) == (2, 1)
    assert samples.recipe(workers=2).measured.workers == 2


def test_a_dead_address_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_for("http://127.0.0.1:9").model_dump_json(exclude_defaults=True))
    assert llmctl("profile", recipe, "--out", tmp_path / "profile.json") == 2
    assert says(capsys.readouterr().err, "http://127.0.0.1:9/v1/models")
