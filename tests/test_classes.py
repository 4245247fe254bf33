"""What llmctl does not model is refused by name, from a config.json, from flags, from vLLM."""

from dataclasses import replace
from typing import Any

import pytest

from toolkit.catalogue import classes
from toolkit.catalogue.classes import (
    MODELLED,
    not_simulated,
    of_config,
    of_flags,
    of_recipe,
    of_resolved,
    refusal,
    refuse,
    refused,
)
from toolkit.catalogue.known import KNOWN
from toolkit.catalogue.resolved import CacheGroup, Drafts, Resolved
from toolkit.errors import InputError

# The keys of real config.json files that decide.
CONFIGS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_local_experts": 32,
        },
        {"windows"},
    ),
    "gemma-3-27b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "sliding_window": 1024,
            },
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        {"windows", "media"},
    ),
    "mistral-7b-v0.1": (
        {"model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096},
        {"window only"},
    ),
    "qwen3-next-80b": (
        {
            "model_type": "qwen3_next",
            "num_hidden_layers": 48,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
            "linear_num_value_heads": 32,
        },
        {"states"},
    ),
    "nemotron-h": (
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M*-", "num_hidden_layers": 7},
        {"states"},
    ),
    "bamba": ({"model_type": "bamba", "layers_block_type": ["mamba", "attention"]}, {"states"}),
    "llama-4": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "attention_chunk_size": 8192,
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
                "num_hidden_layers": 4,
            },
        },
        {"chunks"},
    ),
    "deepseek-v3.2": (
        {"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048},
        {"best tokens"},
    ),
    "deepseek-v4": (
        {"model_type": "deepseek_v4", "compress_ratios": [4, 128], "num_hidden_layers": 2},
        {"compressed caches"},
    ),
    "minimax-m3": (
        {
            "model_type": "minimax_m3",
            "num_hidden_layers": 2,
            "sparse_attention_config": {"use_sparse_attention": True, "sparse_topk_blocks": 16},
        },
        {"sparse attention"},
    ),
    "mimo-v2-flash": (
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 3,
            "hybrid_layer_pattern": [0, 1, 1],
            "attention_chunk_size": 128,
            "sliding_window": 128,
        },
        {"windows"},
    ),
    "glm-5.2": (
        {
            "model_type": "glm_moe_dsa",
            "kv_lora_rank": 512,
            "index_topk": 2048,
            "layer_types": ["deepseek_sparse_attention"] * 2,
            "num_hidden_layers": 2,
        },
        {"best tokens"},
    ),
    "a kind of its own": (
        {"model_type": "new", "layer_types": ["a_new_kind", "full_attention"]},
        {"unknown cache"},
    ),
    "llama-4, the rest by default": (
        {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]},
        {"media"},
    ),
    "bart": ({"model_type": "bart", "is_encoder_decoder": True}, {"encoder"}),
    "qwen3-vl": ({"model_type": "qwen3_vl", "vision_config": {"depth": 27}}, {"media"}),
    "a diffusion model": ({"model_type": "dllm", "canvas_length": 64}, {"diffusion"}),
}
PLAIN = {
    "llama": {"model_type": "llama", "num_hidden_layers": 32},
    "qwen3": {"model_type": "qwen3", "sliding_window": None, "use_sliding_window": False},
    "mimo": {"model_type": "mimo", "sliding_window": 32768, "use_sliding_window": False},
    "minimax-m2.5": {"model_type": "minimax_m2", "attn_type_list": [1, 1], "num_hidden_layers": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": None},
}
NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
MLA = CacheGroup("mla", "MLAAttentionSpec", 16, 61, 18432)
FULL = CacheGroup("full", "FullAttentionSpec", 16, 16, 32768)
WINDOW = CacheGroup("window", "SlidingWindowSpec", 16, 16, 32768, window=128)
STATE = CacheGroup("state", "MambaSpec", 1056, 12, 1 << 20, mode="align")
ONE = Resolved([FULL], blocks=1000, bytes_per_block=524288)


def names(found: list[classes.ClassFound]) -> set[str]:
    return {one.name for one in found}


@pytest.mark.parametrize("model", CONFIGS)
def test_the_classes_of_a_model_are_those_of_its_config(model: str) -> None:
    config, wanted = CONFIGS[model]
    found = of_config(config)
    assert names(found) == wanted
    unmodelled = wanted - set(MODELLED)
    if not unmodelled:
        refuse(model, found)
        return
    with pytest.raises(InputError) as refused:
        refuse(model, found)
    assert len(refused.value.message.splitlines()) == 1
    unknown = [one.what for one in found if one.name in unmodelled]
    assert [what for what in unknown if what not in refused.value.message] == []


@pytest.mark.parametrize("model", PLAIN)
def test_a_model_with_full_attention_is_not_refused(model: str) -> None:
    assert of_config(PLAIN[model]) == []


def test_no_known_model_is_refused() -> None:
    assert not {name for name, model in KNOWN.items() if refusal(of_config(model.config))}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--speculative-config", '{"method": "mtp"}'], "drafts as flags"),
        (["--speculative_config.method=ngram"], "drafts as flags"),
        (["-sc", "{}"], "drafts as flags"),
        (["--spec-method", "mtp"], "drafts as flags"),
        (["--nnodes", "2"], "several nodes"),
        (["-r", "1"], "several nodes"),
        (["--headless"], "several nodes"),
        (["--distributed-executor-backend", "ray"], "other executor"),
        (["--cpu-offload-gb", "0.5"], "offload"),
        (["--max-num-seqs", "64"], "policy parameter"),
        (["--max-num-batched-tokens=4096"], "policy parameter"),
        (["--config", "vllm.yaml"], "config file"),
        (["--max-num-queued-reqs", "100"], "queue limit"),
        (["--convert", "embed"], "no tokens"),
        (["--swa-bounded-replay"], "replay"),
        (["--long-prefill-token-threshold-adaptive"], "long prefill threshold"),
        (["--kv-transfer-config", NIXL.replace("both", "producer")], "connector"),
        (["--data-parallel-size", "2"], "data parallel"),
        (["-dp=4"], "data parallel"),
        (["--data-parallel-hybrid-lb"], "data parallel"),
        (["-dpe"], "data parallel"),
        (["-dpa", "10.0.0.1"], "data parallel"),
        (["--pipeline_parallel_size=2"], "pipeline parallel"),
        (["-dcp", "2"], "context parallel"),
        (["--kv-transfer-config", "{}"], "connector"),
        (["--kv-offloading-size", "4"], "connector"),
        (["--ec-transfer-config", "{}"], "connector"),
        (["--enable-lora"], "lora"),
        (["--enable-eplb"], "moving experts"),
        (["--enable-dbo"], "dual batch"),
        (["--scheduling-policy", "priority"], "priority"),
        (["--runner", "pooling"], "no tokens"),
        (["--max-num-active-seqs", "4"], "active rows"),
        (["--long-prefill-token-threshold=64"], "long prefill threshold"),
        (["--prefill-schedule-interval", "4"], "prefill interval"),
        (["--prefix-match-unit", "16"], "fine hits"),
    ],
)
def test_flags_that_are_not_modelled_are_found(words: list[str], name: str) -> None:
    assert names(of_flags(["--swap-space", "-4", *words])) == {name}


def test_drafts_as_flags_name_the_key_that_has_them() -> None:
    assert "engine.vllm.drafts" in refusal(of_flags(["--spec-method", "mtp"]))


def test_nixl_without_another_pool_moves_nothing() -> None:
    words = ["--kv-transfer-config", NIXL]
    assert names(of_flags(words)) == {"idle connector"}
    assert not refusal(of_recipe(PLAIN["llama"], words))
    windows = of_recipe(CONFIGS["gpt-oss-20b"][0], words)
    assert "NixlConnector" in refusal(windows)  # it finds prefixes in several groups by itself
    idle = replace(ONE, connectors=["NixlConnector kv_both"])
    assert not refusal(of_resolved(idle))
    assert refusal(of_resolved(replace(idle, groups=[FULL, WINDOW])))


def test_structured_output_is_named_and_not_refused() -> None:
    words = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    assert of_flags(words) == []
    assert "--tool-call-parser" in not_simulated(words)[0]
    assert not_simulated(["--seed", "2"]) == []


def test_flags_that_change_nothing_are_not_found() -> None:
    words = ["--nnodes", "1", "--cpu-offload-gb", "0", "--distributed-executor-backend", "mp"]
    assert of_flags(words) == []
    words = ["--data-parallel-size=1", "-pp", "1", "--scheduling-policy", "fcfs", "--seed", "2"]
    words += ["--long-prefill-token-threshold", "0", "--enable-expert-parallel"]
    assert of_flags(words) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"groups": [WINDOW, FULL]}, "windows"),
        ({"groups": [WINDOW]}, "window only"),
        ({"groups": [replace(WINDOW, spec="SlidingWindowMLASpec")]}, "compressed caches"),
        ({"groups": [replace(STATE, mode="all")]}, "unknown cache"),
        ({"groups": [replace(FULL, window=128)]}, "full windows"),
        ({"groups": [replace(WINDOW, kind="chunk")]}, "chunks"),
        ({"groups": [STATE, replace(FULL, block=1056)]}, "states"),
        ({"groups": [FULL, FULL]}, "groups"),
        ({"groups": [FULL, replace(FULL, block=32)]}, "block sizes"),
        ({"groups": [replace(FULL, kind="ring", spec="CircularBufferSpec")]}, "rings"),
        ({"groups": [replace(FULL, replay=64)]}, "replay"),
        ({"groups": [CacheGroup("", "RSWASpec", 16, 2, 1024)]}, "unknown cache"),
        ({"index_topk": 2048}, "sparse attention"),
        ({"index_topk": 2048, "groups": [MLA]}, "best tokens"),
        ({"fine_hits": True}, "fine hits"),
        ({"drafts": Drafts("mtp", 3)}, "drafts"),
        ({"dp": 2}, "data parallel"),
        ({"dp_rank": 1}, "data parallel"),
        ({"pp": 2}, "pipeline parallel"),
        ({"cp": 2}, "context parallel"),
        ({"connectors": ["kv_transfer_config"]}, "connector"),
        ({"media": True}, "media"),
        ({"encoder": True}, "encoder"),
        ({"runner": "pooling"}, "no tokens"),
        ({"diffusion": True}, "diffusion"),
        ({"lora": True}, "lora"),
        ({"policy": "priority"}, "priority"),
        ({"balanced_experts": True}, "moving experts"),
        ({"dual_batch": True}, "dual batch"),
        ({"max_num_active_seqs": 4}, "active rows"),
        (
            {"long_prefill_token_threshold": 64, "long_prefill_token_threshold_adaptive": True},
            "long prefill threshold",
        ),
    ],
)
def test_a_server_is_refused_from_what_vllm_resolved(change: dict[str, Any], name: str) -> None:
    found = of_resolved(replace(ONE, **change))
    assert names(found) == {name}
    assert bool(refusal(found)) == (name not in MODELLED)


def test_a_threshold_for_long_prefills_is_modelled_with_all_groups_of_caches() -> None:
    for groups in ([FULL], [FULL, WINDOW], [WINDOW]):
        plain = replace(ONE, groups=groups)
        cut = replace(plain, long_prefill_token_threshold=64)
        assert of_resolved(cut) == of_resolved(plain)


def test_a_plain_server_is_not_refused() -> None:
    latent = replace(FULL, kind="mla", spec="MLAAttentionSpec")
    experts = replace(ONE, groups=[latent], experts=[64, 6], tp=2, quantization="fp8")
    assert of_resolved(ONE) == of_resolved(experts) == []


def test_a_model_that_sees_is_not_refused_for_text_alone() -> None:
    config = CONFIGS["qwen3-vl"][0]
    assert names(of_recipe(config, [])) == {"media"}
    assert of_recipe(config, ["--language-model-only"]) == []


@pytest.mark.parametrize(
    ("version", "refuses"),
    [("", False), ("0.31.0", True), ("0.32.0", False), ("0.33.1", False), ("of my own", False)],
)
def test_states_are_modelled_as_releases_from_0_32_on_schedule_them(
    version: str, refuses: bool
) -> None:
    found = of_resolved(replace(ONE, groups=[FULL, STATE]), version)
    assert bool(refused(found)) == refuses


@pytest.mark.parametrize(
    ("method", "version", "refuses"),
    [
        ("ngram", "0.30.0", True),
        ("ngram", "0.31.0", False),
        ("ngram", "0.33.0", False),
        ("eagle", "0.30.0", True),
        ("eagle", "0.32.0", False),
        ("eagle", "0.33.0", False),
    ],
)
def test_drafts_are_modelled_of_the_releases_that_were_compared(
    method: str, version: str, refuses: bool
) -> None:
    drafts = Drafts(method, 3, lookahead=3 if method == "eagle" else 0)
    found = of_resolved(replace(ONE, drafts=drafts), version)
    assert bool(refused(found)) == refuses
