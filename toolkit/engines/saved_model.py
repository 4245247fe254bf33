"""Random models on disk, for engines that read theirs from there: drawn once from the recipe, kept for next time.

They have a tokenizer.json of bytes beside them, a token for each, so that such an engine pays for text as it does with
a real model. It is the built-in byte tokenizer but for its special tokens, which have names here.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from toolkit.engines.bytes_tokenizer import BOS, EOS, PAD
from toolkit.files.recipe import HardwareSpec, ModelSpec

SPECIAL = {BOS: "<s>", EOS: "</s>", PAD: "<pad>"}


def saved_model(spec: ModelSpec, hardware: HardwareSpec) -> str:
    """What an engine loads: the recipe's folder or hub id, or the folder of its random model, made where it is not.

    `EngineError` for a config that is no model's.
    """
    if spec.source != "random":
        return spec.source
    folder = _folder(spec)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            _save(spec, hardware, Path(name))
            made = shutil.copytree(name, f"{name}.done")
        try:
            os.rename(made, folder)
        except OSError:  # somebody else was faster, with the same
            shutil.rmtree(made)
    return str(folder)


def _folder(spec: ModelSpec) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]
    return cache / "llmctl" / "models" / f"{spec.config['model_type']}-{digest}"


def _save(spec: ModelSpec, hardware: HardwareSpec, folder: Path) -> None:
    from toolkit.engines.loading import load_model

    load_model(spec, hardware).save_pretrained(folder)
    _save_tokenizer(folder, spec.max_model_len)


def _save_tokenizer(folder: Path, max_model_len: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(_symbols())}
    vocabulary |= {name: token for token, name in SPECIAL.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL.values()])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[PAD],
        model_max_length=max_model_len,
    ).save_pretrained(folder)


def _symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]
