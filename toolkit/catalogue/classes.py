"""The classes of models and servers that need rules of their own, in one list, and those modelled.

`doctor`, `recipe new`, `profile`, `fit`, `simulate`, `tune`, `capacity` and `serve` ask here and
refuse by name what is not modelled. A class comes from a config.json (`of_config`), from vLLM's
flags in a recipe (`of_flags`), or from what vLLM resolved (`of_resolved`), which decides where it
is known. To serve a class, add its name to `MODELLED`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolkit.catalogue.flags import GivenFlag, known_flags, read_flags
from toolkit.catalogue.layers import integer_at, text_config
from toolkit.catalogue.models import SENSES, special_of
from toolkit.catalogue.quantization import Config
from toolkit.catalogue.releases import Release, named, release_of
from toolkit.catalogue.resolved import IDLE_CONNECTOR, CacheGroup, Drafts, Resolved
from toolkit.errors import InputError

CLASSES = {  # each with the reason why it needs rules of its own
    # caches
    "windows": "a window's blocks are freed as it moves, and prefixes must hit in every group",
    "window only": "blocks are freed as the window moves, so memory does not grow with tokens",
    "several windows": "a step reads another number of tokens in each",
    "full windows": "the cache keeps every token, and a step reads only the window's",
    "chunks": "a step reads only the tokens of its own chunk",
    "states": "a state takes a few blocks per request, whatever its length",
    "groups": "several groups of caches share one pool, each with a table of its own",
    "block sizes": "groups with blocks of several sizes share one pool",
    "compressed caches": "a cache keeps one entry for several tokens",
    "sparse attention": "a step reads only the best cached tokens, and the index reads all",
    "best tokens": "a step reads only the best cached tokens of MLA, and the index reads all",
    "replay": "tokens are computed again after a hit",
    "rings": "a cache of fixed size per request is in the pool, too",
    "fine hits": "prefixes hit at less than a block",
    "unknown cache": "its rules are not known",
    # what the model does
    "encoder": "the encoder's passes and its cache are not counted",
    "media": "images, audio and video have a budget and a cache of their own; with "
    "--language-model-only in engine.vllm.args its text part is served alone",
    "no tokens": "it generates no tokens",
    "diffusion": "it generates several tokens per pass, out of order",
    # what the server does
    "drafts": "drafts take part in every pass, by rules that are not modelled",
    "drafts as flags": "its rules are known where engine.vllm.drafts has them; as flags they are "
    "not seen",
    "data parallel": "its engines share out requests, or wait for one another; for a dense model "
    "give `workers: N` in its place",
    "pipeline parallel": "several passes are under way in stages",
    "context parallel": "a block holds the tokens of several devices",
    "moving experts": "experts move between devices while it serves",
    "dual batch": "two halves of a batch overlap",
    "connector": "caches come and go, and requests wait for them",
    "idle connector": "no pool gives or takes its caches, so it moves nothing",
    "several nodes": "passes cross from one machine to another",
    "other executor": "other processes start the passes, and their times are not known",
    "offload": "weights come from host memory in every pass",
    "other scheduler": "it changes which rows a pass has, by rules that are not modelled",
    "other model": "the model that it names is not that of the config",
    "no text": "it takes and gives token ids alone",
    "queue limit": "requests beyond a full queue are turned away",
    "policy parameter": "it is a parameter of policy vllm; among engine.vllm.args it is not seen",
    "config file": "its flags are not seen; write them into the recipe, or into engine.vllm.args",
    "lora": "adapters add work to each pass and take memory",
    "priority": "the waiting queue is in order of priority",
    "active rows": "fewer rows run at once than max_num_seqs",
    "long prefill threshold": "a parameter of policy vllm, and not adaptive; among "
    "engine.vllm.args it is not seen",
    "other release": "this release schedules them by other rules than those that are modelled",
    "prefill interval": "it is a parameter of policy vllm; among engine.vllm.args it is not seen",
}
# The first release of vLLM with the rules that are modelled, by `llmctl vllm-check`
# (docs/reference/vllm-versions.md). What is not here has had the same rules since 0.28.
RELEASES: dict[str, Release] = {"states": (0, 32), "drafts": (0, 31)}
MODELLED: tuple[str, ...] = (
    *("windows", "window only", "states", "groups", "block sizes", "idle connector"),
    "best tokens",
)
TEXT_ONLY = "--language-model-only"
TRANSFER = "--kv-transfer-config"
STRUCTURED = (  # flags of servers that take requests with a grammar or tools
    *("--structured-outputs-config", "--guided-decoding-backend", "--enable-auto-tool-choice"),
    *("--tool-call-parser", "--tool-parser-plugin"),
)
HINT = "measure such a server from outside, as engine openai; or serve the model without that"


@dataclass(frozen=True, slots=True)
class ClassFound:
    """That a model or a server is of a class: the class, and what it has, in words."""

    name: str
    what: str

    @property
    def reason(self) -> str:
        """Why it needs rules of its own."""
        return CLASSES[self.name]


def refused(found: Iterable[ClassFound]) -> list[ClassFound]:
    """Return the classes that llmctl does not model, each once."""
    return [one for one in dict.fromkeys(found) if one.name not in MODELLED]


def refusal(found: Iterable[ClassFound]) -> str:
    """What is not modelled and why, in one line; '': all is modelled."""
    refuses = refused(found)
    return "; ".join(f"{one.what}: {one.reason}" for one in refuses)


def refuse(subject: str, found: Iterable[ClassFound]) -> None:
    """Raise `InputError` in one line for what is not modelled; `subject` has it."""
    if why := refusal(found):
        raise InputError(f"{subject} has what llmctl does not model: {why}", HINT)


def of_recipe(config: Config, words: Sequence[str], longest: int = 0) -> list[ClassFound]:
    """The classes of a model with flags on vLLM's command line; `longest`: see `special_of`."""
    found = [*of_config(config, longest), *of_flags(words)]
    names = {one.name for one in found}
    if any(flag.name == TEXT_ONLY and not flag.negated for flag in read_flags(words)[0]):
        found = [one for one in found if one.name != "media"]
    if "idle connector" in names and names & {"windows", "window only", "states"}:
        what = f"{IDLE_CONNECTOR} beside several kinds of caches"
        found.append(ClassFound("connector", what))  # it finds prefixes in each by itself
    return found


def not_simulated(words: Sequence[str]) -> list[str]:
    """Return what some requests of such a server may ask for and the simulator leaves out, in
    words; the server itself is not refused.
    """
    given = {flag.name for flag in read_flags(words)[0] if not flag.negated}
    asked = [flag for flag in STRUCTURED if flag in given]
    if not asked:
        return []
    return [
        f"structured output ({', '.join(asked)}): requests that ask for a grammar or a tool wait "
        "for its masks in every pass, which is not simulated"
    ]


def of_config(config: Config, longest: int = 0) -> list[ClassFound]:
    """The classes of a model, from the dict of its config.json; `longest`: see `special_of`."""
    found = []
    special = special_of(config, longest)
    text = text_config(config)
    layers, window = special.windows
    whole = integer_at(text, "num_hidden_layers")
    if ratios := text.get("compress_ratios"):
        count = len(set(map(str, ratios))) if isinstance(ratios, list) else 1
        found.append(ClassFound("compressed caches", f"compressed caches of {count} ratios"))
    if special.states:
        found.append(ClassFound("states", f"{special.states} beside attention"))
    if special.unknown:
        found.append(ClassFound("unknown cache", f"layers of kind '{special.unknown}'"))
    if special.chunk:
        found.append(ClassFound("chunks", f"attention in chunks of {special.chunk:,} tokens"))
    if layers:
        name = "window only" if whole and layers >= whole and not special.states else "windows"
        found.append(ClassFound(name, f"sliding windows of {window:,} tokens in {layers} layers"))
    if special.sparse:
        name = "best tokens" if special.best else "sparse attention"
        found.append(ClassFound(name, special.sparse))
    if text.get("canvas_length") is not None:
        found.append(ClassFound("diffusion", "a diffusion model of text"))
    if config.get("is_encoder_decoder"):
        found.append(ClassFound("encoder", "an encoder beside its decoder"))
    if what := " and ".join(senses_of(config)):
        found.append(ClassFound("media", f"inputs of {what}"))
    return found


def senses_of(config: Config) -> list[str]:
    """Return what a model takes beside text: vision, audio; 'media' where only the name of its
    class tells, because the config leaves the rest to defaults (Llama 4).
    """
    if found := [key.removesuffix("_config") for key in SENSES if config.get(key)]:
        return found
    classes = config.get("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    takes = named.endswith("ForConditionalGeneration") and not config.get("is_encoder_decoder")
    return ["media"] if takes else []


def of_flags(words: Sequence[str]) -> list[ClassFound]:
    """The classes of a server, from flags on vLLM's command line."""
    last = {flag.name: flag for flag in read_flags(words)[0]}  # the last of a name counts
    return [one for flag in last.values() if (one := of_flag(flag)) is not None]


def of_flag(flag: GivenFlag) -> ClassFound | None:
    """The class that a flag turns on; None: none."""
    if flag.name == TRANSFER:
        return _of_transfer(flag.value)
    known = known_flags().get(flag.name)
    if known is None or flag.negated or not known.turns_on(flag.value):
        return None
    return ClassFound(known.cls, known.says or f"{flag.name} {flag.value}")


def _of_transfer(text: str) -> ClassFound:
    """Return the class of a connector: NIXL with both roles moves nothing while no request names
    another pool, as it is in one pool.
    """
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if isinstance(given, dict):
        named = f"{given.get('kv_connector')} {given.get('kv_role')}"
        if named == IDLE_CONNECTOR:
            return ClassFound("idle connector", named)
    return ClassFound("connector", "a KV connector")


def of_resolved(resolved: Resolved, version: str = "") -> list[ClassFound]:
    """The classes of a server, from what vLLM resolved; `version` is vLLM's, if it is known."""
    found = [*_of_groups(resolved), *_of_server(resolved)]
    names = dict.fromkeys(one.name for one in found)
    if resolved.drafts is not None:
        names["drafts"] = None
    return [*found, *of_release(names, version)]


def of_release(names: Iterable[str], version: str) -> list[ClassFound]:
    """Which of these classes a release of vLLM schedules by other rules; none where the release is
    not known.
    """
    release = release_of(version)
    found = []
    for name in names:
        first = RELEASES.get(name)
        if release is not None and first is not None and release < first:
            what = f"{name} in vLLM {version}, modelled of {named(first)} and newer"
            found.append(ClassFound("other release", what))
    return found


# vLLM's methods of speculative decoding with known rules: whether they draft with the model's
# states, and so cache them.
DRAFTING = {"ngram": False, "eagle": True, "eagle3": True, "mtp": True}


def _of_drafts(drafts: Drafts | None) -> list[ClassFound]:
    """Speculative decoding by rules that `toolkit.sim.drafts` does not have."""
    if drafts is None:
        return []
    which = f"speculative decoding ({drafts.method}, {drafts.tokens} drafts)"
    slots = drafts.tokens if DRAFTING.get(drafts.method) else 0
    others = {
        "": drafts.method not in DRAFTING,
        " with a number that follows the batch": bool(drafts.schedule),
        " in parallel": drafts.padded,
        f" with {drafts.lookahead} slots": drafts.lookahead != slots,
        f" with hashes that cover {drafts.hash_lookahead} tokens behind a block": (
            drafts.hash_lookahead > int(slots > 0)
        ),
    }
    return [ClassFound("drafts", f"{which}{how}") for how, is_so in others.items() if is_so]


def _of_groups(resolved: Resolved) -> list[ClassFound]:
    groups = resolved.groups
    found = [one for group in groups for one in _of_group(group, alone=len(groups) == 1)]
    if len({group.block for group in groups}) > 1:
        sizes = ", ".join(f"{size:,}" for size in sorted({group.block for group in groups}))
        found.append(ClassFound("block sizes", f"blocks of {sizes} tokens"))
    windows = {group.window for group in groups if group.kind == "window"}
    if len(windows) > 1:
        words = " and ".join(f"{window:,}" for window in sorted(windows))
        found.append(ClassFound("several windows", f"sliding windows of {words} tokens"))
    if len(groups) > 1 and not found:
        found.append(ClassFound("groups", f"{len(groups)} groups of KV caches"))
    if resolved.fine_hits:
        found.append(ClassFound("fine hits", "--prefix-match-unit"))
    if resolved.index_topk:
        what = f"sparse attention to {resolved.index_topk:,} tokens"
        is_plain_mla = len(groups) == 1 and groups[0].kind == "mla"
        found.append(ClassFound("best tokens" if is_plain_mla else "sparse attention", what))
    return found


def _of_group(group: CacheGroup, *, alone: bool) -> list[ClassFound]:
    found = []
    where = f"{group.window:,} tokens in {group.layers} layers"
    match group.kind:
        case "window":
            name = "window only" if alone else "windows"
            if group.spec != "SlidingWindowSpec":
                name = "compressed caches"
            found.append(ClassFound(name, f"sliding windows of {where}"))
        case "chunk":
            found.append(ClassFound("chunks", f"attention in chunks of {where}"))
        case "state":
            mode = f" (mode {group.mode})" if group.mode else ""
            name = "states" if group.mode in ("align", "none") else "unknown cache"
            found.append(ClassFound(name, f"states in {group.layers} layers{mode}"))
        case "ring":
            found.append(ClassFound("rings", f"a {group.spec}"))
        case "full" | "mla":
            if group.window:
                found.append(ClassFound("full windows", f"sliding windows of {where}, kept whole"))
        case _:
            found.append(ClassFound("unknown cache", f"a KV cache of kind {group.spec}"))
    if group.replay:
        found.append(ClassFound("replay", f"{group.replay:,} tokens computed again after a hit"))
    return found


def _of_server(resolved: Resolved) -> list[ClassFound]:
    found = []
    sizes = (
        ("data parallel", "data_parallel_size", resolved.dp),
        ("pipeline parallel", "pipeline_parallel_size", resolved.pp),
        ("context parallel", "context parallelism", resolved.cp),
    )
    found += [ClassFound(name, f"{what} {size}") for name, what, size in sizes if size > 1]
    if resolved.dp == 1 and resolved.dp_rank:  # of engines that count as alone
        found.append(ClassFound("data parallel", f"engine {resolved.dp_rank} of data parallelism"))
    found += _of_drafts(resolved.drafts)
    alone = len(resolved.groups) == 1
    for one in resolved.connectors:
        idle = one == IDLE_CONNECTOR and alone
        found.append(ClassFound("idle connector" if idle else "connector", one))
    rows = resolved.max_num_active_seqs
    if rows is not None:
        found.append(ClassFound("active rows", f"max_num_active_seqs {rows}"))
    threshold = resolved.adaptive_threshold
    if threshold:
        what = f"a threshold for long prefills of {threshold} tokens or more, by the load"
        found.append(ClassFound("long prefill threshold", what))
    if resolved.policy != "fcfs":
        found.append(ClassFound("priority", f"scheduling policy '{resolved.policy}'"))
    if resolved.runner != "generate":
        found.append(ClassFound("no tokens", f"runner '{resolved.runner}'"))
    switches: Mapping[str, tuple[bool, str]] = {
        "encoder": (resolved.encoder, "an encoder beside its decoder"),
        "media": (resolved.media, f"inputs of images, audio or video ({TEXT_ONLY}: none)"),
        "diffusion": (resolved.diffusion, "a diffusion model of text"),
        "lora": (resolved.lora, "LoRA adapters"),
        "moving experts": (resolved.balanced_experts, "experts that are balanced or elastic"),
        "dual batch": (resolved.dual_batch, "dual batch overlap"),
    }
    found += [ClassFound(name, what) for name, (is_on, what) in switches.items() if is_on]
    return found
