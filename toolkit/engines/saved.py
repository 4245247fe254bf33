"""A random model in a folder, for an engine that reads its model from disk.

The model is made by torch and transformers; a model that is stored already needs neither.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from toolkit.engine_traits import MODEL_LIBRARIES
from toolkit.engines.tokenizer import BOS, EOS, PAD
from toolkit.extras import install, require
from toolkit.files.recipe import HardwareSpec, ModelSpec

SPECIAL_NAMES = {BOS: "<s>", EOS: "</s>", PAD: "<pad>"}


def saved_model(spec: ModelSpec, hardware: HardwareSpec) -> str:
    """What an engine that reads its model from disk loads: the recipe's folder or hub id, or the
    folder of its random model, which is made once and kept in the user's cache.

    Raises `EngineError` for an invalid config, or where torch or transformers is not installed.
    """
    if spec.source != "random":
        return spec.source
    require(MODEL_LIBRARIES, "a random model", install("engines"))
    from toolkit.engines.loading import load_model  # here: it imports torch, which takes seconds

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]
    folder = cache / "llmctl" / "models" / f"{spec.config['model_type']}-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            load_model(spec, hardware, to_run=False).save_pretrained(name)
            _save_tokenizer(Path(name), spec.max_model_len)
            made = shutil.copytree(name, f"{name}.done")
        try:
            os.rename(made, folder)
        except OSError:  # another process has made the same folder meanwhile
            shutil.rmtree(made)
    return str(folder)


def _save_tokenizer(folder: Path, max_model_len: int) -> None:
    """Write a tokenizer.json with one token per byte, so that an engine spends as much time on text
    as with a real model.

    It is the built-in byte tokenizer, except that its special tokens have names.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Byte-level vocabularies show each byte as a printable character (GPT-2's `bytes_to_unicode`).
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    hidden = iter(range(256, 512))
    vocabulary = {chr(byte if byte in shown else next(hidden)): byte for byte in range(256)}
    vocabulary |= {name: token for token, name in SPECIAL_NAMES.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in SPECIAL_NAMES.values()]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_NAMES[BOS],
        eos_token=SPECIAL_NAMES[EOS],
        pad_token=SPECIAL_NAMES[PAD],
        model_max_length=max_model_len,
    ).save_pretrained(folder)
