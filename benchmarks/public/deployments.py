"""What llmctl makes of public vLLM deployments: usable, refused and why, or not read.

    python -m benchmarks.public.deployments --sources FOLDER --configs FOLDER
        [--page docs/results/deployments.md] [--data docs/results/data/deployments.json]

FOLDER of --sources has checkouts, each named OWNER+NAME, of the repositories in `SOURCES`; the page
says which commits. --configs has config.json files of models, named ORG--NAME_config.json
(aiconfigurator's `model_configs`). Takes seconds, and needs no network.

A deployment is usable if each of its flags and variables is read, none asks for what llmctl does
not model, and its model is not refused. The model is judged by its config.json where --configs has
it; elsewhere by what `FAMILIES` says of its name, else only its flags are judged, and the page
counts those.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.command import make_parser
from benchmarks.engines.family_sizes import config_of
from toolkit.adopt.command import FoundServer, read_command
from toolkit.adopt.documents import servers_in
from toolkit.adopt.recipe import Verdict, merged, read_server
from toolkit.catalogue.classes import TEXT_ONLY, of_config, refused
from toolkit.catalogue.gpus import GPUS
from toolkit.catalogue.models import facts_of, not_computed
from toolkit.errors import InputError
from toolkit.files.find_model import FoundModel
from toolkit.files.new_recipe import MODEL_LEN, Wish, new_recipe
from toolkit.profiling.analytic import pass_times

RECIPES = "vllm-project+recipes"
STACK = "vllm-project+production-stack"
LLM_D = "llm-d+llm-d-benchmark"
OTHERS = (
    "vllm-project+aibrix",
    "GoogleCloudPlatform+kubernetes-engine-samples",
)
MOST_GPUS = 64  # that share a model
SOURCES = (RECIPES, STACK, LLM_D, *OTHERS)
GUIDES = "## From a guide to an answer"  # a section of the page that is written by hand
# What names say of models without a config at hand: (a part of the name, its class).
FAMILIES = (
    ("DeepSeek-V3.2", ""),
    ("DeepSeek-V4", "compressed caches"),
    ("DeepSeek-OCR", "media"),
    ("GLM-5", ""),
    ("MiniMax-M3", "sparse attention"),
    ("Kimi-Linear", ""),
    ("Llama-4", "chunks"),
    *((one, "media") for one in ("llava", "-vl", "audio", "vision", "pixtral", "omni", "gemma-3-")),
    ("reranker", "no tokens"),
    ("embedding", "no tokens"),
    ("jina-embeddings", "no tokens"),
    ("DiffusionGemma", "diffusion"),
)


@dataclass
class Judged:
    """What llmctl makes of one deployment.

    Attributes:
        source: the repository.
        where: the file, and the server in it.
        model: as the deployment names it.
        outcome: usable, refused or unread.
        reasons: classes that are refused, or why it was not read.
        by: what judged the model: its config, its name, or only the flags.
        verdicts: of its flags and variables.
    """

    source: str
    where: str
    model: str
    outcome: str
    reasons: list[str] = field(default_factory=list)
    by: str = "flags"
    verdicts: list[Verdict] = field(default_factory=list)


def judge(
    source: str,
    where: str,
    server: FoundServer,
    configs: Mapping[str, Any],
    *,
    sees: bool = False,
) -> Judged:
    """Return what llmctl makes of a server; `sees`: its source says that it takes media."""
    try:
        read = read_server(server)
    except InputError as error:
        return Judged(source, where, server.model, "unread", [error.message])
    names = [one.name for one in read.refused]
    name = server.model.rpartition("/")[2]
    config = configs.get(server.model) or configs.get(name)
    if config is None:  # another precision of the same model
        config = next((one for key, one in configs.items() if key.startswith(f"{name}-")), None)
    by = "flags"
    if config is not None:
        by = "config"
        found = [one.name for one in refused(of_config(config))]
        if TEXT_ONLY in read.args:
            found = [one for one in found if one != "media"]
        names += found
    else:
        for start, cls in FAMILIES:
            if start.lower() in name.lower():
                by = "name"
                is_text = cls == "media" and TEXT_ONLY in read.args
                names += [cls] if cls and not is_text else []
                break
    if sees and TEXT_ONLY not in read.args:
        names.append("media")
    names = list(dict.fromkeys(names))
    outcome = "refused" if names else "usable"
    return Judged(source, where, server.model, outcome, names, by, read.verdicts)


def of_recipes(folder: Path) -> Iterator[tuple[str, FoundServer | InputError, bool]]:
    """Yield the servers of vLLM's recipes, at the flags that are on by default, and as text where
    the recipe offers that.
    """
    for file in sorted(folder.glob("models/*/*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        tasks = content["meta"].get("tasks") or []
        if tasks == ["omni"]:
            continue
        features = content.get("features") or {}
        off = content.get("opt_in_features") or []
        on = [name for name in features if name not in off and name != "encoder_parallel"]
        if "text_only" in features:
            on.append("text_only")
        model = content["model"]
        given = [*(model.get("base_args") or [])]
        given += [word for name in on for word in features[name].get("args") or []]
        given += content["variants"]["default"].get("extra_args") or []
        words = [part for word in given for part in _parts(str(word))]
        variables = {str(k): str(v) for k, v in (model.get("base_env") or {}).items()}
        where = str(file.relative_to(folder))
        sees = any(task in ("multimodal", "omni") for task in tasks)
        try:
            server = command_of(["vllm", "serve", model["model_id"], *words])
            found: FoundServer | InputError = replace(server, variables=variables)
        except InputError as error:
            found = error
        yield where, found, sees


def _parts(word: str) -> list[str]:
    """Return a flag and its value that are written as one word."""
    return word.split(" ", 1) if word.startswith("--") else [word]


def command_of(words: list[str]) -> FoundServer:
    """Return the server of a command in words."""
    return read_command(" ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in words))


def of_files(
    folder: Path, pattern: str, what: str
) -> Iterator[tuple[str, FoundServer | InputError, bool]]:
    """Yield the servers of YAML files; a file without any is left out."""
    for file in sorted(folder.rglob(pattern)):
        text = file.read_text(encoding="utf-8", errors="replace")
        where = str(file.relative_to(folder))
        if not re.search(r"vllm|modelSpec", text) or "/templates/" in where:
            continue
        if re.search(r"\{\{", text):
            continue  # of a chart, which its values fill
        try:
            for server in servers_in(file, [what]):
                yield f"{where}: {server.name}", server, False
        except InputError as error:
            if "no vLLM server" not in error.message:
                yield where, error, False


def of_pages(folder: Path) -> Iterator[tuple[str, FoundServer | InputError, bool]]:
    """Yield the servers of production-stack's values in its tutorials."""
    for file in sorted(folder.glob("tutorials/*.md")):
        blocks = re.findall(r"```ya?ml\n(.*?)```", file.read_text(encoding="utf-8"), re.DOTALL)
        for number, block in enumerate(one for one in blocks if "modelSpec" in one):
            place = Path("build/deployments.yaml")
            place.parent.mkdir(exist_ok=True)
            place.write_text(block, encoding="utf-8")
            where = f"{file.relative_to(folder)}, block {number + 1}"
            try:
                for server in servers_in(place, ["values"]):
                    yield f"{where}: {server.name}", server, False
            except InputError as error:
                if "no vLLM server" not in error.message:
                    yield where, error, False


def of_scenarios(folder: Path) -> Iterator[tuple[str, FoundServer | InputError, bool]]:
    """Yield the servers of llm-d-benchmark's scenarios, as its template starts them."""
    defaults = yaml.safe_load((folder / "config/templates/values/defaults.yaml").read_text())
    for file in sorted(folder.glob("config/scenarios/*/*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for scenario in content.get("scenario") or ():
            values = merged(defaults, scenario.get("common") or {})
            values = merged(values, {k: v for k, v in scenario.items() if k != "common"})
            where = f"{file.relative_to(folder)}: {scenario.get('name', '')}"
            if values["images"]["vllm"]["repository"].endswith("sim"):
                continue  # no engine
            try:
                yield where, scenario_server(values), False
            except InputError as error:
                yield where, error, False


def scenario_server(values: Mapping[str, Any]) -> FoundServer:
    """Return the server that a scenario starts in its pool for decodes."""
    service = values.get("modelservice") or {}
    pool = merged(values["decode"], service.get("decode") or {})
    prefill = merged(values.get("prefill") or {}, service.get("prefill") or {})
    if not service.get("enabled", True) and (values.get("standalone") or {}).get("enabled"):
        pool = merged(pool, values["standalone"])
        prefill = {}
    common = values.get("vllmCommon") or {}
    model = values["model"]
    parallel = {**(pool.get("parallelism") or {})}
    variables = {
        "MODEL_PATH": model.get("path", ""),
        "MODEL_NAME": model["name"],
        "VLLM_BLOCK_SIZE": model.get("blockSize", 64),
        "VLLM_MAX_MODEL_LEN": model.get("maxModelLen", 16000),
        "VLLM_TENSOR_PARALLELISM": parallel.get("tensor", 1),
        "TP_SIZE": parallel.get("tensor", 1),
        "DP_SIZE": parallel.get("data", 1),
        "DP_SIZE_LOCAL": parallel.get("dataLocal", 1),
        "VLLM_ACCELERATOR_MEM_UTIL": model.get("gpuMemoryUtilization", 0.95),
        "VLLM_MAX_NUM_SEQ": 256,
        "VLLM_MAX_NUM_BATCHED_TOKENS": 8192,
        "VLLM_LOAD_FORMAT": "auto",
        "VLLM_INFERENCE_PORT": 8000,
        "VLLM_METRICS_PORT": 8200,
        "LWS_WORKER_INDEX": 0,
        "LWS_LEADER_ADDRESS": "leader",
        "START_RANK": 0,
        "POD_IP": "pod",
    }
    engine = pool.get("vllm") or {}
    for part in (common, pool, engine):
        given = part.get("extraEnvVars") or ()
        variables |= {one["name"]: one.get("value", "") for one in given}
    command = re.sub(r"\$\{accelerator[^}]*\}", "", engine.get("customCommand") or "")
    flags = common.get("flags") or {}
    if not command:
        words = [f"vllm serve {model['name']} --block-size $VLLM_BLOCK_SIZE"]
        words.append("--max-model-len $VLLM_MAX_MODEL_LEN")
        words.append("--tensor-parallel-size $VLLM_TENSOR_PARALLELISM")
        if float(model.get("gpuMemoryUtilization", 0.95)):
            words.append("--gpu-memory-utilization $VLLM_ACCELERATOR_MEM_UTIL")
        words += ["--enforce-eager"] if flags.get("enforceEager") else []
        words += ["--no-enable-prefix-caching"] if flags.get("noPrefixCaching") else []
        words += ["--enable-prefix-caching"] if flags.get("enablePrefixCaching") else []
        words += [str(one) for one in engine.get("additionalFlags") or ()]
        command = " ".join(words)
    transfer = common.get("kvTransfer") or {}
    if transfer.get("enabled"):
        named = {"kv_connector": transfer.get("connector"), "kv_role": transfer.get("role")}
        command += f" --kv-transfer-config '{json.dumps(named)}'"
    exports = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
    server = read_command(exports + re.sub(r"export \w+=\$\(.*", "", command))
    name = server.model if "/model-cache" not in server.model else model["name"]
    if prefill.get("enabled", True) and int(prefill.get("replicas") or 0):
        apart = read_command("vllm serve a --kv-transfer-config '{}'").flags
        server = replace(server, flags=[*server.flags, *apart])
    return replace(server, model=model["name"] if name.startswith("/") else name)


def judged(sources: Path, configs: Mapping[str, Any]) -> list[Judged]:
    """Return what llmctl makes of every deployment."""
    stack = sources / STACK
    places = [
        (RECIPES, of_recipes(sources / RECIPES)),
        (STACK, of_files(stack, "*.yaml", "values")),
        (STACK, of_pages(stack)),
        (STACK, of_files(stack / "operator", "*.yaml", "manifest")),
        (LLM_D, of_scenarios(sources / LLM_D)),
    ]
    for other in OTHERS:
        for pattern in ("*.yaml", "*.yml"):
            places.append((other, of_files(sources / other, pattern, "manifest")))
            places.append((other, of_files(sources / other, pattern, "compose")))
    found: list[Judged] = []
    for source, servers in places:
        for where, server, sees in servers:
            if any((one.source, one.where) == (source, where) for one in found):
                continue  # a file that is read as two kinds
            if isinstance(server, InputError):
                problem = server.whole.replace(f"{sources / source}/", "")
                found.append(Judged(source, where, "", "unread", [problem]))
            else:
                found.append(judge(source, where, server, configs, sees=sees))
    return found


def configs_in(folder: Path) -> dict[str, Any]:
    """Return the configs of models, by hub id and by name."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*_config.json")):
        if "hf_quant" in file.name:
            continue
        name = file.name.removesuffix("_config.json").replace("--", "/")
        config = json.loads(file.read_text(encoding="utf-8"))
        found[name] = found[name.rpartition("/")[2]] = config
    return found


def models_in(folder: Path) -> list[tuple[str, str, str]]:
    """Return what llmctl makes of each config.json: the model, how far it gets (nothing, sizes,
    recipe, or laws, on some of the GPUs with measured operators), and why no further.
    """
    found = []
    for file in sorted(folder.glob("*_config.json")):
        if "hf_quant" not in file.name:
            name = file.name.removesuffix("_config.json").replace("--", "/")
            found.append((name, *_how_far(config_of(file))))
    return found


def _how_far(config: Mapping[str, Any]) -> tuple[str, str]:
    try:
        facts = facts_of(config)
    except InputError as error:
        return "nothing", error.message.partition(":")[0]
    model = FoundModel("a model", "a", "", config, "a public config")
    reached, why = "sizes", ""
    for gpu in GPUS.values():
        if not gpu.measured:
            continue
        try:
            recipe = new_recipe(model, Wish(gpu, gpus=MOST_GPUS)).recipe()
            reached = "recipe"
            pass_times(recipe)
            return "laws", ""
        except InputError as error:
            why = why or error.message.removeprefix("a model has what llmctl does not model: ")
    return reached, ", ".join(not_computed(config, MODEL_LEN, facts.scheme)) or why


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout."""
    words = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def model_lines(models: list[tuple[str, str, str]]) -> list[str]:
    """Return the page's section about models."""
    whys: dict[str, list[str]] = {}
    for name, reached, why in models:
        if reached != "laws":
            whys.setdefault(f"{why} | {reached}", []).append(name)
    steps = ("sizes", "recipe", "laws")
    counts = [sum(steps.index(to) >= at for _, to, _ in models if to in steps) for at in range(3)]
    most_first = sorted(whys.items(), key=lambda one: -len(one[1]))
    return [
        MODELS_HEAD.format(len(models), *counts),
        "| no laws, since | gets | models |",
        "|---|---|---|",
        *(f"| {why} | {', '.join(names)} |" for why, names in most_first),
        "",
    ]


def page_of(found: list[Judged], commits: Mapping[str, str], models: list[str]) -> str:
    """Return the page of results; `models`: lines of the section about models."""
    lines = [
        PAGE_HEAD,
        "| source | deployments | usable | refused | not read | model judged by its config |",
    ]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for source in (*SOURCES, ""):
        own = [one for one in found if source in ("", one.source)]
        counts = Counter(one.outcome for one in own)
        with_config = sum(one.by != "flags" for one in own)
        name = f"{source.replace('+', '/')} at {commits[source]}" if source else "all"
        usable = f"{counts['usable']} ({100 * counts['usable'] / len(own):.0f} %)"
        numbers = (len(own), usable, counts["refused"], counts["unread"], with_config)
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    reasons = Counter(one for each in found if each.outcome == "refused" for one in each.reasons)
    lines += [
        "",
        "Refused for, where one may have several reasons:",
        "",
        "| class | deployments |",
        "|---|--:|",
    ]
    lines += [f"| {name} | {count} |" for name, count in reasons.most_common()]
    lines += ["", "Not read:", ""]
    lines += [
        f"- {one.source.replace('+', '/')}, {one.where}: {one.reasons[0].replace('`', '')}"
        for one in found
        if one.outcome == "unread"
    ]
    whats = Counter(verdict.what for one in found for verdict in one.verdicts)
    total = sum(whats.values())
    words = ", ".join(f"{count:,} {what}" for what, count in whats.most_common())
    lines += ["", f"Of {total:,} flags and variables: {words}.", "", *models]
    return "\n".join(lines)


PAGE_HEAD = """\
# Public deployments

    python -m benchmarks.public.deployments --sources FOLDER --configs FOLDER

What `recipe from-command`, `from-values`, `from-compose` and `from-manifest` make of vLLM
deployments that others publish ([raw data](data/deployments.json)). *Usable*: each flag and
variable is read, and none asks for what llmctl does not model, nor does the model. Nothing was
started. Where no config.json was at hand, the flags alone were judged, and the model only by what
its source says: whether it takes media, and names of families that are known to have sparse
attention, chunks or no tokens. vLLM's recipes are read with the features that are on by default,
and as text where they offer that.
"""

MODELS_HEAD = """\
## Models

Of {} config.json in aiconfigurator's `model_configs` {} are sized, {} make a recipe (as text where
they also see), and {} have [laws computed from measured operators](../explanation/profiling.md)
on a GPU that holds them. The others are refused by name:
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--configs", type=Path, required=True)
    parser.add_argument("--page", type=Path, default=Path("docs/results/deployments.md"))
    parser.add_argument("--data", type=Path, default=Path("docs/results/data/deployments.json"))
    given = parser.parse_args()
    found = judged(given.sources, configs_in(given.configs))
    commits = {source: commit_of(given.sources / source) for source in SOURCES}
    models = model_lines(models_in(given.configs))
    _, guides, by_hand = given.page.read_text(encoding="utf-8").partition(GUIDES)
    page = f"{page_of(found, commits, models)}\n{guides}{by_hand}"
    given.page.write_text(page, encoding="utf-8")
    rows = [
        {
            "source": one.source.replace("+", "/"),
            "where": one.where,
            "model": one.model,
            "outcome": one.outcome,
            "reasons": one.reasons,
            "model_judged_by": one.by,
        }
        for one in found
    ]
    text = json.dumps({"commits": commits, "deployments": rows}, indent=0)
    given.data.write_text(f"{text}\n", encoding="utf-8")
    print(Counter(one.outcome for one in found))


if __name__ == "__main__":
    main()
