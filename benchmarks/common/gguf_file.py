"""A Llama of transformers as a GGUF file (version 3) in float32, for llama.cpp.

The vocabulary is made up: llama.cpp's own converter needs a tokenizer, which a random model lacks.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 32
UINT32 = 4
INT32 = 5
FLOAT32 = 6
STRING = 8
ARRAY = 9
# kinds of tokens
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
BYTE = 6
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_llama(
    path: Path, config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]]
) -> None:
    """Write a model. `config` and `weights` are those of transformers."""
    tensors = {_name(name): _rotated(name, weight, config) for name, weight in weights.items()}
    keys = _keys(config)
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)))
        for key, (kind, value) in keys.items():
            file.write(_text(key) + struct.pack("<I", kind) + _value(kind, value))
        offset = 0
        for name, weight in tensors.items():
            shape = weight.shape[::-1]
            file.write(
                _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
            )
            offset += -(-weight.nbytes // ALIGNMENT) * ALIGNMENT
        for weight in tensors.values():
            file.write(
                bytes(-file.tell() % ALIGNMENT) + np.ascontiguousarray(weight, np.float32).tobytes()
            )


def _keys(config: Mapping[str, Any]) -> dict[str, tuple[int, Any]]:
    heads = config["num_attention_heads"]
    vocab = config["vocab_size"]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    words += [f"\u2581w{index}" for index in range(vocab - len(words))]
    kinds += [NORMAL] * (vocab - len(kinds))
    rope = config.get("rope_parameters") or {}
    return {
        "general.architecture": (STRING, "llama"),
        "general.name": (STRING, "random"),
        "llama.block_count": (UINT32, config["num_hidden_layers"]),
        "llama.context_length": (UINT32, config["max_position_embeddings"]),
        "llama.embedding_length": (UINT32, config["hidden_size"]),
        "llama.feed_forward_length": (UINT32, config["intermediate_size"]),
        "llama.attention.head_count": (UINT32, heads),
        "llama.attention.head_count_kv": (UINT32, config["num_key_value_heads"]),
        "llama.attention.layer_norm_rms_epsilon": (FLOAT32, config["rms_norm_eps"]),
        "llama.rope.dimension_count": (UINT32, config["hidden_size"] // heads),
        "llama.rope.freq_base": (FLOAT32, float(rope.get("rope_theta", 10_000.0))),
        "llama.vocab_size": (UINT32, vocab),
        "tokenizer.ggml.model": (STRING, "llama"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, words)),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * vocab)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, kinds)),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
    }


def _name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"


def _rotated(
    name: str, weight: NDArray[np.float32], config: Mapping[str, Any]
) -> NDArray[np.float32]:
    """Reorder the rows: llama.cpp rotates neighbouring pairs, transformers the two halves of a
    head.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((key for part, key in heads.items() if part in name), None)
    if key is None:
        return weight
    count = config[key]
    width = weight.shape[1]
    return (
        weight.reshape(count, 2, weight.shape[0] // count // 2, width)
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_many(inner, values))
    return struct.pack("<f" if kind == FLOAT32 else "<I", value)


def _many(kind: int, values: Sequence[Any]) -> list[bytes]:
    if kind == INT32:
        return [struct.pack("<i", value) for value in values]
    return [_value(kind, value) for value in values]
