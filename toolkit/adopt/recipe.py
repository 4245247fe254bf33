"""A recipe of a vLLM server that exists, and what became of each of its flags and variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.adopt.command import FoundServer
from toolkit.adopt.documents import NOT_GIVEN
from toolkit.catalogue.classes import (
    HINT,
    MODELLED,
    TEXT_ONLY,
    ClassFound,
    of_flag,
    refusal,
    senses_of,
)
from toolkit.catalogue.flags import GivenFlag, What, known_flags, of_variable, read_flags
from toolkit.catalogue.gpus import Gpu, gpu_of
from toolkit.errors import InputError
from toolkit.files.find_model import FoundModel, find_model
from toolkit.files.new_recipe import NewRecipe, ServerSettings, TraceLengths, Wish, new_recipe
from toolkit.files.recipe import DraftsSpec, Recipe, is_secret
from toolkit.files.strict import load_documents
from toolkit.units import MIB

SHARE = 0.92  # vLLM's default of gpu_memory_utilization, 0.28 to 0.33
TEXTS = ("--host", "--served-model-name")  # which may look like numbers
DTYPES = {"half": "float16", "float": "float32"}
METHODS = {  # vLLM's kernels of a quantization, and the checkpoint's name of it
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "mxfp4": "mxfp4",
}
MTP = re.compile(r"(mtp|.*_mtp)")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a flag or a variable of a server in its recipe.

    Attributes:
        subject: the flag or the variable, as it was typed.
        what: see `What`.
        why: the reason; of what is modelled, the key of the recipe.
    """

    subject: str
    what: What
    why: str


@dataclass
class ReadServer:
    """A server's command in the terms of a recipe.

    Attributes:
        verdicts: of each flag and variable, in order.
        tensor_parallel: GPUs that share one copy of the model.
        max_model_len: tokens; None: the model's own limit.
        quantization, dtype, cache_dtype, revision: '': as the checkpoint is.
        share: `gpu_memory_utilization`.
        config: changes of the model's config.json.
        drafts: the keys of speculative decoding, as vLLM names them.
        sections: values of the recipe's sections (`SECTIONS`), each with the flag that sets it.
        args: further flags, in words.
        variables: of the environment.
        refused: classes that are not modelled.
    """

    server: FoundServer
    verdicts: list[Verdict] = field(default_factory=list)
    tensor_parallel: int = 1
    max_model_len: int | None = None
    quantization: str = ""
    dtype: str = ""
    cache_dtype: str = ""
    revision: str = ""
    share: float = SHARE
    config: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, tuple[object, str]]] = field(default_factory=dict)
    args: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    refused: list[ClassFound] = field(default_factory=list)

    @property
    def refusal(self) -> str:
        """Return what the server asks for and llmctl does not model; '': nothing."""
        return refusal(self.refused)

    def settings(self, origin: str) -> ServerSettings:
        """Return what a recipe repeats of the server."""
        return ServerSettings(
            origin,
            **{name: self.sections.get(name, {}) for name in SECTIONS.values()},
            args=self.args,
            variables=self.variables,
            share=self.share,
            cache_dtype=self.cache_dtype,
        )

    def set(self, section: str, key: str, value: object, flag: str) -> None:
        """Note a value of the recipe, and the flag that sets it."""
        self.sections.setdefault(SECTIONS[section], {})[key] = (value, flag)

    def found_model(self, model: FoundModel) -> FoundModel:
        """Return the model with its revision and config as flags change them."""
        changes = dict(self.config)
        if self.dtype:
            changes |= {"dtype": self.dtype, "torch_dtype": self.dtype}
        revision = self.revision or model.revision
        return replace(model, config=merged(model.config, changes), revision=revision)


SECTIONS = {  # the sections of a recipe that repeat values of a server, and their names here
    "model": "model",
    "engine": "engine",
    "engine.vllm": "vllm",
    "policy.parameters": "policy",
    "serve": "serve",
}


def read_server(server: FoundServer) -> ReadServer:
    """Return a server's command in the terms of a recipe.

    A flag that is not modelled stays in the result, with its reason: nothing is dropped unsaid.

    Raises `InputError` for a value that vLLM would not take.
    """
    read = ReadServer(_with_config_file(server))
    last = {flag.name: flag for flag in read.server.flags if not flag.path}
    for flag in read.server.flags:
        if last.get(flag.name, flag) is flag:  # of a flag that is given twice the last one counts
            _read_flag(read, flag)
        else:
            read.verdicts.append(Verdict(_shown(flag), "ignored", "it is given again later"))
    if read.drafts:
        _read_drafts(read)
    for name, value in read.server.variables.items():
        _read_variable(read, name, value)
    if server.gpus > read.tensor_parallel:
        used = f"the command uses {read.tensor_parallel} of them"
        read.verdicts.append(Verdict(f"{server.gpus} GPUs", "ignored", used))
    for what, why in read.server.beside:
        read.verdicts.append(Verdict(what, "left out", why))
    return read


def _read_flag(read: ReadServer, flag: GivenFlag) -> None:
    known = known_flags().get(flag.name)
    assert known is not None  # the command was read strictly
    if known.what == "modelled":
        _read_modelled(read, flag)
        read.verdicts.append(Verdict(_shown(flag), "modelled", known.why))
        return
    found = of_flag(flag)
    if found is not None and found.name not in MODELLED:
        read.refused.append(found)
        read.verdicts.append(Verdict(_shown(flag), "refused", found.reason))
        return
    if known.what != "left out":
        read.args += flag.words
    what, why = known.what, known.why
    if known.what == "refused":  # with this value it turns nothing on
        what, why = "ignored", found.reason if found is not None else "it is vLLM's default"
    read.verdicts.append(Verdict(_shown(flag), what, why))


def _read_modelled(read: ReadServer, flag: GivenFlag) -> None:
    name, value = flag.name, flag.value
    typed = _shown(flag)
    section, _, key = known_flags()[name].why.rpartition(".")
    if name == "--tensor-parallel-size":
        read.tensor_parallel = _tokens(flag)
    elif name == "--max-model-len":
        if value not in ("auto", "-1"):
            read.max_model_len = _tokens(flag)
    elif name == "--gpu-memory-utilization":
        read.share = _real(flag)
        if not 0.0 < read.share <= 1.0:
            raise InputError(f"{typed}: it is above 0 and at most 1", "vLLM's default is 0.92")
    elif name == "--kv-cache-memory-bytes":
        read.set(section, key, round(_tokens(flag) / MIB, 3), typed)
    elif name == "--dtype":
        read.dtype = "" if value == "auto" else DTYPES.get(value, value)
    elif name == "--quantization":
        read.quantization = METHODS.get(value, value)
    elif name == "--kv-cache-dtype":
        if value != "auto":
            read.cache_dtype = value
            read.set(section, key, value, typed)
    elif name == "--hf-overrides":
        read.config = merged(read.config, _json_of(flag))
        read.args += flag.words
    elif name == "--speculative-config":
        read.drafts = merged(read.drafts, _json_of(flag))
    elif name.startswith("--spec-"):
        names = {"method": "method", "model": "model", "tokens": "num_speculative_tokens"}
        given = _tokens(flag) if name == "--spec-tokens" else value
        read.drafts[names[name.removeprefix("--spec-")]] = given
    elif name == "--config":
        return  # its flags were read before
    elif name == "--language-model-only":
        read.args += flag.words
    elif name == "--revision":
        read.revision = value
    elif known_flags()[name].switch:
        read.set(section, key, not flag.negated, typed)
    elif name in TEXTS:
        read.set(section, key, value, typed)
    else:
        read.set(section, key, _number(flag), typed)


def _read_drafts(read: ReadServer) -> None:
    """Make `engine.vllm.drafts` of the flags of speculative decoding, or refuse their method."""
    options = dict(read.drafts)
    method = str(options.pop("method", "") or "")
    model = options.pop("model", None)
    count = options.pop("num_speculative_tokens", None)
    method = "mtp" if MTP.fullmatch(method) else method
    known = DraftsSpec.model_fields["method"].annotation
    if method not in getattr(known, "__args__", ()):
        what = f"speculative decoding ({method or 'a method that vLLM finds by the model'})"
        read.refused.append(ClassFound("drafts", what))
        return
    if not isinstance(count, int):
        raise InputError(
            "speculative decoding without a number of drafts", "give num_speculative_tokens"
        )
    spec: dict[str, object] = {"method": method}
    if model is not None:
        spec["model"] = model
    if options:
        spec["options"] = options
    read.set("engine.vllm", "drafts", spec, "")
    read.set("policy.parameters", "num_speculative_tokens", count, "")


def _read_variable(read: ReadServer, name: str, value: str) -> None:
    if is_secret(name) or value == NOT_GIVEN:
        why = "a secret" if is_secret(name) else "the cluster gives its value"
        read.verdicts.append(Verdict(name, "left out", f"{why}: set it where the server starts"))
        return
    what, why = of_variable(name)
    if what == "measured":
        read.variables[name] = value
    read.verdicts.append(Verdict(f"{name}={value}", what, why))


def _with_config_file(server: FoundServer) -> FoundServer:
    """Return the server with the flags of its --config file before its own, which win."""
    files = [flag for flag in server.flags if flag.name == "--config"]
    if not files:
        return server
    path = Path(files[-1].value)
    (content,) = load_documents(path)[:1] or [None]
    if not isinstance(content, dict):
        raise InputError(f"--config {path}: no flags in it", "it has a flag and its value a line")
    words: list[str] = []
    model = server.model
    for key, value in content.items():
        if key in ("model", "model_tag"):
            model = model or str(value)
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"--{key}", text]
    flags, _ = read_flags(words, strict=True)
    return replace(server, model=model, flags=[*flags, *server.flags])


def _shown(flag: GivenFlag) -> str:
    """Return a flag as it was typed; of a secret its name alone."""
    if known_flags()[flag.name].why.startswith("a secret"):
        return flag.name
    return " ".join(flag.words)


def _tokens(flag: GivenFlag) -> int:
    """Return a whole number as vLLM reads it: 1k is 1,000 and 1K is 1,024. Raises `InputError` for
    another value.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", flag.value)
    if not found:
        raise InputError(f"{flag.name} {flag.value[:40]}: not a number", "give a whole number")
    number, unit = found.groups()
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1000 if unit.islower() else 1024) ** power)


def _number(flag: GivenFlag) -> int | float:
    return _real(flag) if "." in flag.value else _tokens(flag)


def _real(flag: GivenFlag) -> float:
    try:
        return float(flag.value)
    except ValueError:
        raise InputError(f"{flag.name} {flag.value[:40]}: not a number", "give 0.9") from None


def _json_of(flag: GivenFlag) -> dict[str, Any]:
    """Return a value in JSON, or of `--flag.key value`. Raises `InputError` for another one."""
    if flag.path:
        try:
            nested: Any = json.loads(flag.value)
        except ValueError:
            nested = flag.value
        for key in reversed(flag.path):
            nested = {key: nested}
        return dict(nested)
    try:
        content = json.loads(flag.value)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{flag.name}: not a JSON object: {flag.value[:60]}", "quote it")
    return content


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with the values of another, mappings in it merged."""
    found = dict(old)
    for key, value in new.items():
        before = found.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(before, value)
        found[key] = value
    return found


def made_recipe(
    read: ReadServer,
    origin: str,
    gpu: str,
    model_source: str,
    targets: Mapping[str, float],
    traffic: TraceLengths | None,
) -> tuple[NewRecipe, Recipe]:
    """Return the recipe of a server.

    Args:
        origin: where the server was read, in words.
        gpu: its GPU; '': the file says it.
        model_source: where the model's sizes are read; '': where the server reads it.
        targets: in seconds.
        traffic: the lengths to tune for.

    Raises InputError for what is not modelled, with all of it, and for what neither the server nor
    an argument says.
    """
    from toolkit.sched.policies import make_any  # it loads numba, which help does not need

    if read.refusal:
        raise InputError(f"the server asks for what llmctl does not model: {read.refusal}", HINT)
    server = read.server
    if not (model_source or server.model):
        raise InputError("the command names no model", "add it, or give --model")
    model = find_model(model_source or server.model)
    if model_source and server.model:  # the sizes alone are of --model
        model = replace(model, source=server.model, revision="", weights=True)
    model = read.found_model(model)
    takes = senses_of(model.config)
    if takes and TEXT_ONLY not in read.args:
        raise InputError(
            f"{model.name} takes {' and '.join(takes)}, too, which llmctl does not model",
            f"add {TEXT_ONLY} to the command: its text part is then served alone",
        )
    tensor_parallel = read.tensor_parallel
    wish = Wish(
        gpu=_gpu(gpu, server.gpu),
        gpus=tensor_parallel * server.replicas,
        tensor_parallel=tensor_parallel,
        quantization=read.quantization,
        max_model_len=read.max_model_len,
        targets=targets,
        traffic=traffic,
        server=read.settings(origin),
    )
    made = new_recipe(model, wish)
    recipe = made.recipe()
    make_any(recipe.policy.name, recipe.policy.parameters)  # refuses what vLLM would
    return made, recipe


def _gpu(given: str, found: str) -> Gpu:
    """Return the GPU of --gpu, else of a file. Raises `InputError` where neither is known."""
    if given:
        return gpu_of(given)
    if not found:
        raise InputError("--gpu is missing", "llmctl recipe gpus lists those that are known")
    try:
        return gpu_of(found.replace("-", " "))
    except InputError:
        try:
            return gpu_of(found.removeprefix("nvidia-"))
        except InputError as error:
            raise InputError(
                f"the file's GPU '{found}' is not known", f"--gpu; {error.hint}"
            ) from None
