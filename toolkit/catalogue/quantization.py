"""Bytes of quantized weights, from the `quantization_config` of a config.json.

A scheme says how many bytes a weight takes, scales and zero points included, and which modules keep
16 bits. The layouts are vLLM's (`vllm/model_executor/layers/quantization/`): one scale per block of
128 x 128 or per output for fp8, per group for four bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import cast

from pydantic_core import SchemaError, SchemaValidator, core_schema

from toolkit.errors import InputError, nearest

Config = Mapping[str, object]

# What `--quantization` asks of vLLM for a checkpoint in 16 bits. Four bits need a checkpoint that
# was calibrated for them.
ONLINE = ("fp8",)
METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
_BLOCK = 128  # the sides of a block of fp8 weights with one scale
_INPUTS = 4096  # of a layer with one scale per output: a scale is a thousandth of its weights
_NVFP4_GROUP = 16  # weights per scale of one byte
_MXFP4_GROUP = 32
# Of the names of modules that keep 16 bits: checkpoints list some hundred.
MOST_NAMES = 8192
MOST_PATTERNS = 1024  # with wildcards
MOST_REGULAR = 64  # behind `re:`
MOST_MIXED = 1 << 16  # that name their own scheme
LONGEST_NAME = 256  # characters
_WILD = re.compile(r"[*?\[]")
_COUNTED = re.compile(r"\{[0-9]*,?[0-9]{2,}")  # such repetitions make a program of megabytes


class KeptModules:
    """Modules that keep 16 bits: names, patterns with wildcards, and regular expressions behind
    `re:`, as a config.json lists them.

    They come with a model of a stranger, so a match takes time linear in the name's length: Rust's
    regular expressions do not backtrack, and fnmatch's do not backtrack over a wildcard. Raises
    `InputError` for more or longer ones than a checkpoint has, and for expressions with lookarounds
    or back-references, which Rust's do not have.
    """

    __slots__ = ("_expressions", "_names", "_patterns")

    def __init__(self, listed: Sequence[str] = ()) -> None:
        expressions = [one[3:] for one in listed if one.startswith("re:")]
        others = [one for one in listed if not one.startswith("re:")]
        patterns = [one for one in others if _WILD.search(one)]
        for found, most, what in (
            (listed, MOST_NAMES, "names"),
            (patterns, MOST_PATTERNS, "names with wildcards"),
            (expressions, MOST_REGULAR, "regular expressions"),
        ):
            if len(found) > most:
                problem = f"quantization_config: {len(found):,} {what} of modules that keep 16 bits"
                raise InputError(problem, f"at most {most:,} are read")
        if longest := max((one for one in listed if len(one) > LONGEST_NAME), key=len, default=""):
            problem = f"quantization_config: '{longest[:40]}...' has {len(longest):,} characters"
            raise InputError(problem, f"a name of modules has at most {LONGEST_NAME}")
        patterns = [_plain(one) for one in patterns]
        self._names = frozenset(map(_plain, others))
        self._patterns = re.compile(
            "|".join(translate(one + end) for one in patterns for end in ("", ".*")) or r"(?!)"
        )
        self._expressions = _linear(expressions)

    def __contains__(self, module: str) -> bool:
        """Whether a module, such as 'model.layers.3.self_attn.q_proj', keeps 16 bits."""
        parts = module.split(".")
        begins = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        if parts[-1] in self._names or any(begin in self._names for begin in begins):
            return True
        if self._patterns.match(module):
            return True
        return self._expressions is not None and self._expressions.isinstance_python(module)


def _plain(module: str) -> str:
    """Return a module's name as in a checkpoint of text alone: 'model.layers.3...'."""
    for prefix in ("model.language_model.", "language_model.model.", "backbone."):
        if module.startswith(prefix):
            return f"model.{module.removeprefix(prefix)}"
    return module.removeprefix("language_model.")


def _linear(expressions: Sequence[str]) -> SchemaValidator | None:
    """One expression for all of them, which match from a name's begin; None: there are none."""
    if not expressions:
        return None
    known = "lookarounds and back-references are not known, and counts have one digit"
    if counted := next((one for one in expressions if _COUNTED.search(one)), ""):
        raise InputError(f"quantization_config: 're:{counted[:80]}' counts too far", known)
    either = "|".join(f"(?:{one})" for one in expressions)
    try:
        return SchemaValidator(
            core_schema.str_schema(pattern=f"^(?:{either})", regex_engine="rust-regex")
        )
    except SchemaError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        shown = ", ".join(f"'re:{one[:40]}'" for one in expressions[:3])
        problem = f"quantization_config: cannot read {shown}: {reason[:120]}"
        raise InputError(problem, known) from None


@dataclass(frozen=True, slots=True)
class Scheme:
    """How weights are stored.

    Attributes:
        name: fp8, int8, int4, nvfp4, mxfp4, or mixed.
        weight_bytes: of one quantized weight, its share of the scales included.
        words: the same for readers, such as '8 bits and a scale per 128 x 128'.
        kept: the modules that keep 16 bits.
        block: the sides of a block with one scale; 0: no blocks. It must divide each GPU's part.
        cache: the dtype of the KV cache that the checkpoint asks for; '': that of the model.
        experts: bytes of a weight of routed experts, where they are stored otherwise; 0: they
            are not.
        head: whether the table of the output is quantized where it is not kept.
        listed: of mixed: bytes of a weight by module; others keep 16 bits.
    """

    name: str
    weight_bytes: float
    words: str
    kept: KeptModules = field(default_factory=KeptModules, compare=False)
    block: int = 0
    cache: str = ""
    experts: float = 0.0
    head: bool = False
    listed: Mapping[str, float] = field(default_factory=dict, compare=False)

    def bytes_of(self, module: str) -> float | None:
        """Return the bytes of a weight of a linear layer; None: it keeps 16 bits."""
        if self.experts and ".experts." in module:
            return self.experts
        if not self.listed:
            return None if self.keeps(module) else self.weight_bytes
        parts = module.split(".")
        begins = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((self.listed[one] for one in begins if one in self.listed), None)

    def keeps(self, module: str) -> bool:
        """Whether a module, such as 'model.layers.3.self_attn.q_proj', keeps 16 bits."""
        return module in self.kept


def scheme_of(config: Config, wanted: str = "") -> Scheme | None:
    """The scheme of a model's weights; None: all in 16 or 32 bits.

    Args:
        config: the content of config.json.
        wanted: --quantization; '': what the config says.

    Raises `InputError` for a method that is not known, for one that contradicts the config, and for
    one that only a calibrated checkpoint has.
    """
    given = config.get("quantization_config")
    if isinstance(given, Mapping):
        scheme = _stored(cast(Config, given))
        if (apart := config.get("expert_dtype")) is not None:
            scheme = _with_experts(scheme, str(given.get("moe_quant_algo") or apart).lower())
        if wanted and wanted not in (scheme.name, given.get("quant_method")):
            problem = f"--quantization {wanted}: the config has {scheme.name} weights"
            raise InputError(problem, "leave it out, or name the checkpoint that you mean")
        return scheme
    if not wanted:
        return None
    if wanted not in ONLINE:
        if wanted in (*METHODS, "int4", "int8", "nvfp4"):
            problem = f"--quantization {wanted}: this checkpoint is not quantized so"
            hint = f"name one that is (its config.json says so); {ONLINE[0]} needs none"
            raise InputError(problem, hint)
        hint = nearest(wanted, (*METHODS, "int4", "nvfp4"))
        raise InputError(f"there is no quantization '{wanted}'", hint)
    return Scheme("fp8", 1.0, "8 bits, quantized while vLLM loads them, a scale per layer")


def _stored(given: Config) -> Scheme:
    """The scheme of a quantized checkpoint."""
    return replace(_weights(given), cache=_cache(given), head=_method(given) == "modelopt")


def _with_experts(scheme: Scheme, name: str) -> Scheme:
    """The scheme with experts of their own (DeepSeek V4)."""
    known = {"fp4": 0.5 + 1 / _MXFP4_GROUP, "nvfp4": 0.5 + 1 / _NVFP4_GROUP, "fp8": 0.0}
    if name not in known:
        raise InputError(f"expert_dtype '{name[:40]}' is not known", nearest(name, known))
    words = f"{scheme.words}; experts {name}" if known[name] else scheme.words
    kind = "mixed" if known[name] else scheme.name
    return replace(scheme, name=kind, words=words, experts=known[name])


def _method(given: Config) -> str:
    """The method's name; ModelOpt's older files name only the producer."""
    producer = given.get("producer")
    known = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return str(given.get("quant_method") or ("modelopt" if known else ""))[:40].lower()


def _cache(given: Config) -> str:
    """The dtype of the KV cache that vLLM takes from a checkpoint (`get_kv_cache_quant_algo_string`
    in vllm/utils/torch_utils.py); '': that of the model.
    """
    asked = given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo")
    if not asked:
        return ""
    if isinstance(asked, Mapping):
        is_fp8 = asked.get("num_bits") == 8 and asked.get("type") == "float"
    else:
        is_fp8 = str(asked).upper() == "FP8"
    if is_fp8:
        return "fp8"
    problem = f"quantization_config: a KV cache of {str(asked)[:60]} is not known"
    raise InputError(problem, "a checkpoint with a KV cache in 16 bits, or in fp8")


def _weights(given: Config) -> Scheme:
    method = _method(given)
    kept: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "exclude_modules"):
        listed = given.get(key)
        if isinstance(listed, list):
            kept += [str(one) for one in listed]
    modules = KeptModules(kept)
    if method == "fp8":
        return _fp8(given.get("weight_block_size"), modules)
    if method == "mxfp4":
        return _four_bits("mxfp4", _MXFP4_GROUP, modules)
    if method in ("awq", "gptq"):
        bits = given.get("bits", given.get("w_bit", 4))
        return _integers(bits, given.get("group_size", given.get("q_group_size")), modules, method)
    if method == "modelopt":
        algorithm = str(given.get("quant_algo", "")).upper()
        if algorithm == "MIXED_PRECISION":
            return _mixed(given.get("quantized_layers"), modules)
        return _modelopt(algorithm, modules)
    if method == "compressed-tensors":
        return _compressed(given, modules)
    hint = nearest(method, METHODS) if method else f"known: {', '.join(METHODS)}"
    raise InputError(f"quantization_config: there is no method '{method}'", hint)


def _modelopt(algorithm: str, kept: KeptModules) -> Scheme:
    """The scheme of one of ModelOpt's algorithms."""
    if algorithm == "FP8":
        return _fp8(None, kept)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        return _four_bits("nvfp4", _NVFP4_GROUP, kept)
    if algorithm == "MXFP8":
        return Scheme("fp8", 1 + 1 / _MXFP4_GROUP, "8 bits, and a scale per 32 weights", kept)
    raise InputError(
        f"quantization_config: modelopt's {algorithm[:40] or 'unnamed'} scheme is not known",
        "known: FP8, MIXED_PRECISION, MXFP8, NVFP4, W4A16_NVFP4",
    )


def _mixed(layers: object, kept: KeptModules) -> Scheme:
    """The scheme of a checkpoint that names an algorithm for each module."""
    if not isinstance(layers, Mapping) or not layers:
        problem = "quantization_config: MIXED_PRECISION without quantized_layers"
        raise InputError(problem, "measure it: llmctl profile; or give the whole config.json")
    if len(layers) > MOST_MIXED:
        problem = f"quantization_config: quantized_layers has {len(layers):,} modules"
        raise InputError(problem, f"at most {MOST_MIXED:,} are read")
    listed = {}
    names = set()
    for module, one in layers.items():
        algorithm = one.get("quant_algo") if isinstance(one, Mapping) else one
        scheme = _modelopt(str(algorithm).upper(), kept)
        listed[_plain(str(module))] = scheme.weight_bytes
        names.add(scheme.name)
    words = f"{' and '.join(sorted(names))} in {len(listed):,} modules, and 16 bits in others"
    return Scheme("mixed", 0.0, words, kept, listed=listed)


def _compressed(given: Config, kept: KeptModules) -> Scheme:
    """The scheme of llm-compressor's checkpoints: one group of layers with one kind of weight."""
    groups = given.get("config_groups")
    kinds = []
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights not in kinds:
                kinds.append(weights)
            if len(kinds) > 1:
                break
    if len(kinds) != 1:
        count = "several" if kinds else "no"
        problem = f"quantization_config: {count} kinds of weights in compressed-tensors"
        raise InputError(problem, "one kind for all layers is known")
    bits = kinds[0].get("num_bits")
    group_size = kinds[0].get("group_size")
    if kinds[0].get("type") == "float":
        if bits == 8:
            return _fp8(kinds[0].get("block_structure"), kept)
        if bits == 4:
            if group_size == _MXFP4_GROUP:
                return _four_bits("mxfp4", _MXFP4_GROUP, kept)
            return _four_bits("nvfp4", _NVFP4_GROUP, kept)
    return _integers(bits, group_size, kept, "compressed-tensors")


def _fp8(block: object, kept: KeptModules) -> Scheme:
    if isinstance(block, list) and block:
        if block != [_BLOCK, _BLOCK]:
            problem = f"quantization_config: blocks of {str(block)[:40]} are not known"
            raise InputError(problem, "fp8 with blocks of 128 x 128, or without blocks")
        words = "8 bits, and a scale of 32 bits per 128 x 128"
        return Scheme("fp8", 1 + 4 / _BLOCK**2, words, kept, block=_BLOCK)
    return Scheme("fp8", 1 + 4 / _INPUTS, "8 bits, and a scale per output", kept)


def _four_bits(name: str, group: int, kept: KeptModules) -> Scheme:
    words = f"4 bits, and a scale of 8 bits per {group} weights"
    return Scheme(name, 0.5 + 1 / group, words, kept)


def _integers(bits: object, group_size: object, kept: KeptModules, method: str) -> Scheme:
    if bits not in (4, 8):
        raise InputError(
            f"quantization_config: {method} with {str(bits)[:40]} bits is not known", "4, or 8"
        )
    count = 4 if bits == 4 else 8
    if not isinstance(group_size, int) or group_size <= 0:
        words = f"{count} bits, and a scale per output ({method})"
        return Scheme(f"int{count}", count / 8 + 2 / _INPUTS, words, kept)
    share = (2 + count / 8) / group_size  # a scale of 16 bits, and a zero point
    words = f"{count} bits, and a scale and a zero point per {group_size} weights ({method})"
    return Scheme(f"int{count}", count / 8 + share, words, kept)
