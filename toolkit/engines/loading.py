"""From a recipe's `model` to a transformers model on its device.

Random weights are drawn from the recipe's seed, so every worker builds the same model. Stored
weights come from safetensors only: nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from toolkit.engines.memory import is_out_of_memory
from toolkit.engines.slab import check_caches
from toolkit.engines.tokenizer import BOS, EOS, PAD, VOCAB_SIZE
from toolkit.errors import EngineError, nearest
from toolkit.files.recipe import HardwareSpec, ModelSpec

LEGACY_KEYS = ("rope_theta",)  # accepted by transformers, and moved into rope_parameters
# Keys of a config that say nothing about the model itself.
UNRELATED_KEYS = ("_name_or_path", "transformers_version", "dtype", "architectures")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    spec: ModelSpec,
    hardware: HardwareSpec,
    *,
    to_run: bool = True,
) -> PreTrainedModel:
    """The model, in evaluation mode on its device. Raises `EngineError`, in one line, for whatever
    is wrong with it.

    A model that is not `to_run` here may have caches that these engines do not hold.
    """
    device = _device(hardware)
    # Its warnings and progress bars are for notebooks; this module raises real problems.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = load_config(spec)
    if to_run:
        check_caches(config, spec.max_model_len)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions and spec.max_model_len > positions:
        raise EngineError(
            f"model.max_model_len is {spec.max_model_len}; the model has {positions} positions",
            f"set model.max_model_len to at most {positions}",
        )
    is_random = spec.source == "random"
    name = f"a random {spec.config['model_type']}" if is_random else f"model {spec.source}"
    gpus = [device] if device.type == "cuda" else []
    try:
        if not is_random and spec.load_format != "dummy":
            model = _stored_model(spec, device)
        else:
            with torch.random.fork_rng(devices=gpus), device:
                torch.manual_seed(spec.seed)
                model = AutoModelForCausalLM.from_config(
                    config, dtype=DTYPES[spec.dtype], trust_remote_code=spec.trust_remote_code
                )
    except ValueError as error:
        raise EngineError(f"{name} cannot be built: {_one_line(error)}") from None
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            f"{name} does not fit into {hardware.name}'s memory", "use a smaller model"
        ) from None
    _check_model(model)
    return model.eval()


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The model's config: built from `spec.config`, or the stored one, which must agree with it."""
    if spec.source == "random" or (spec.load_format == "dummy" and "model_type" in spec.config):
        return _built_config(spec)
    folder = Path(spec.source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise EngineError(
                f"model folder {spec.source} has no config.json",
                "give a folder that transformers saved",
            )
        if spec.load_format != "dummy" and not any(folder.glob("*.safetensors")):
            raise _no_safetensors(spec)
    elif spec.source.startswith((".", "/", "~")):
        raise EngineError(
            f"model folder {spec.source} does not exist", "give a folder with config.json"
        )
    try:
        config = AutoConfig.from_pretrained(
            spec.source, revision=spec.revision, trust_remote_code=spec.trust_remote_code
        )
    except OSError:
        raise _not_found(spec) from None
    except (StrictDataclassError, ValueError, KeyError) as error:
        raise EngineError(
            f"model {spec.source}: its config cannot be used: {_one_line(error)}"
        ) from None
    for key, value in spec.config.items():
        if getattr(config, key, None) != value:
            raise EngineError(
                f"model.config.{key} is {value}; that of {spec.source} is "
                f"{getattr(config, key, None)}",
                "leave the key out, or correct it",
            )
    return config


def config_digest(config: PreTrainedConfig) -> str:
    """The sha256 of what a config says about its model, without path and version."""
    content = {key: value for key, value in config.to_dict().items() if key not in UNRELATED_KEYS}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a text: from the generation config, perhaps several, or the config."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def _device(hardware: HardwareSpec) -> torch.device:
    if hardware.device == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "hardware.device is cuda, and torch finds no CUDA device",
            "check the driver with nvidia-smi, and that torch was installed with CUDA; or use a "
            "recipe for cpu",
        )
    return torch.device(hardware.device)


def _built_config(spec: ModelSpec) -> PreTrainedConfig:
    keys = dict(spec.config)
    kind = str(keys.pop("model_type"))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise EngineError(
            f"model.config.model_type '{kind}' is not a causal language model of transformers",
            hint if hint.startswith("did you mean") else "like llama, qwen3, mistral, gpt2",
        )
    config_class = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(config_class)}
    known |= {*config_class.attribute_map, *LEGACY_KEYS}
    for key in keys:
        if key not in known:
            raise EngineError(f"model.config.{key}: a {kind} has no such key", nearest(key, known))
    if spec.tokenizer == "bytes":
        keys = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD} | keys
    try:
        config = AutoConfig.for_model(kind, **keys)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise EngineError(
            f"model.config: {_one_line(error)}", f"see the {kind} config in transformers"
        ) from None
    if spec.tokenizer == "bytes" and config.vocab_size < VOCAB_SIZE:
        raise EngineError(
            f"model.config.vocab_size is {config.vocab_size}; the byte tokenizer has {VOCAB_SIZE} "
            "tokens",
            f"set vocab_size to {VOCAB_SIZE} or more",
        )
    return config


def _not_found(spec: ModelSpec) -> EngineError:
    revision = f" at revision {spec.revision}" if spec.revision else ""
    return EngineError(
        f"model {spec.source}{revision}: not on the hub, not permitted, or the hub cannot be "
        "reached",
        "check the name and HF_TOKEN; offline, give a local folder, or load_format: dummy with "
        "model.config",
    )


def _no_safetensors(spec: ModelSpec) -> EngineError:
    return EngineError(
        f"model {spec.source} has no safetensors weights",
        "other formats may run code when they are loaded: convert it with transformers' "
        "save_pretrained",
    )


def _stored_model(spec: ModelSpec, device: torch.device) -> PreTrainedModel:
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            spec.source,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            dtype=DTYPES[spec.dtype],
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the error below refuses them in one line
            output_loading_info=True,
        )
    except OSError as error:
        raise (_no_safetensors(spec) if "safetensors" in str(error) else _not_found(spec)) from None
    except (ValueError, ImportError) as error:
        raise EngineError(f"model {spec.source} cannot be loaded: {_one_line(error)}") from None
    missing = sorted(loaded["missing_keys"]) + sorted(str(key) for key in loaded["mismatched_keys"])
    if missing:
        raise EngineError(
            f"model {spec.source}: {len(missing)} weights are missing or have another shape, "
            f"{missing[0]} first",
            "its weights and its config.json do not belong together",
        )
    return model.to(device)


def _check_model(model: PreTrainedModel) -> None:
    """Refuse models that cannot be served in padded batches with plain caches.

    Left padding needs positions that the caller can set; ALiBi models derive them from their own
    mask. A stored model may ask for quantized caches, which round: plain caches would give other
    text.
    """
    arguments = inspect.signature(model.forward).parameters
    kind = model.config.model_type
    lacks = [name for name in ("position_ids", "logits_to_keep") if name not in arguments]
    if lacks or getattr(model.config, "alibi", False):
        why = f"its forward takes no {lacks[0]}" if lacks else "it uses ALiBi"
        raise EngineError(
            f"model_type '{kind}' cannot be served in padded batches: {why}", "choose another model"
        )
    cache = getattr(model.generation_config, "cache_implementation", None)
    if cache == "quantized":
        raise EngineError(
            f"model_type '{kind}' is stored with cache_implementation '{cache}', which is not "
            "supported",
            "remove cache_implementation from its generation_config.json to serve it with plain "
            "caches",
        )


def _one_line(error: Exception) -> str:
    """The last line of an error's message: transformers puts the reason there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
