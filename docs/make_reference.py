"""Makes the reference pages that follow from the code: `make reference`.

    python -m docs.make_reference            write the pages
    python -m docs.make_reference --check    exit code 1 where one is not current

Each page of `PAGES` is made from one source: commands from their options, the recipe from its JSON
Schema, policies from their parameters, metrics from a server's registry, exit codes from the tree
of errors, variables from `VARIABLES`. `make docs` checks that the pages are current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace
from typing import Any, cast, get_args

from prometheus_client import Metric

from toolkit import api, errors
from toolkit.backends.vllm.conformance.results import shipped_results
from toolkit.backends.vllm.touched import CAPABILITIES, TOUCHED
from toolkit.catalogue.caches import groups_of_config, is_plain
from toolkit.catalogue.classes import TEXT_ONLY, of_recipe, refused, senses_of
from toolkit.catalogue.families import FAMILIES
from toolkit.catalogue.gpus import GPUS
from toolkit.catalogue.models import facts_of, not_computed
from toolkit.cli import main
from toolkit.engine_traits import ENGINES
from toolkit.errors import InputError
from toolkit.estimators.gpu_operators import measured_operators
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.extras import install
from toolkit.files.find_model import FoundModel
from toolkit.files.new_recipe import MODEL_LEN, Wish, new_recipe
from toolkit.files.recipe import SLA_KEYS, Recipe
from toolkit.laws.features import StepShape
from toolkit.profiling.shapes import shapes_of
from toolkit.sched.catalogue import ABOUT
from toolkit.sched.policies import BUILT_IN, KNOWN, ORACLES, make_policy
from toolkit.sched.policies.parameters import Parameter, declared, defaults
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Worker
from toolkit.server.driver import Driver
from toolkit.server.metrics import engine_families, families_of_requests
from toolkit.server.stats import Stats
from toolkit.workers.protocol import Workers

HERE = Path(__file__).parent
NOTE = (
    "<!-- Made by `make reference` from {source}. Not to be edited. -->\n\n# {title}\n\n{about}\n\n"
)
# Environment variables that llmctl reads: their meaning. A test compares the names with the code.
VARIABLES = {
    "LLMCTL_API_KEY": "the key that `serve` requires, and that clients (`bench`, `status`) send",
    "LLMCTL_COMPILED": "0: plain Python; 1: an error if compiled code cannot be built or used",
    "LLMCTL_ENGINE_API_KEY": "engine `openai`: the key of the server that is measured",
    "LLMCTL_URL": "`bench.sh` of a rendered folder: the server's address",
    "LLMCTL_VLLM_PYTHON": "engine `vllm`: the Python of the environment that has vLLM",
    "LLMCTL_VLLM_POLICY": "inside vLLM: the policy and its parameters",
    "LLMCTL_VLLM_FIT": "inside vLLM: fit.json, for policies that need laws of time",
    "LLMCTL_VLLM_PLAN": "inside vLLM: plan.json, in place of the two above",
    "LLMCTL_VLLM_EVENT_LOG": "inside vLLM: a file for every call and decision of our scheduler",
    "LLMCTL_VLLM_ITERATIONS": "inside vLLM: a file with a line for each forward pass",
    "LLMCTL_VLLM_CONTROL_KEY": "inside vLLM: the key of the control of its settings",
    "LLMCTL_CONTROL_KEY": "the same for `serve --live`, which needs it, `set` and `tune --live`",
}
# Variables of others that change what llmctl does.
OTHERS = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that workers may take, in this order",
    "HF_HOME": "where models of the hub are kept; `HF_TOKEN` opens gated ones",
    "RAY_ADDRESS": "the cluster of `--ray auto`; `RAY_AUTH_MODE` and `RAY_AUTH_TOKEN_PATH` say how "
    "to join it",
    "SSL_CERT_FILE": "authorities that clients trust, in place of the system's",
    "XDG_DATA_HOME": "where `vllm-check` keeps its results (`~/.local/share`)",
    "XDG_CACHE_HOME": "where models of `source: random` are saved for vLLM (`~/.cache`)",
}


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def joined(parts: list[str]) -> str:
    return "\n\n".join(part for part in parts if part)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def as_code(text: str) -> str:
    """A help text with its options as code; what is code already stays."""
    option = r"(`[^`]*`)|(?<![\w-])(--[a-z][a-z-]*)"
    return re.sub(option, lambda found: found[1] or f"`{found[2]}`", text)


# Commands


def kind(option: Any) -> str:
    """What an option takes: its metavar, its words, or the type of its value; '' for a flag."""
    if option.is_flag:
        return ""
    if option.metavar:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    words = get_args(annotation) or list(getattr(annotation, "__members__", ()))
    if words and all(isinstance(word, str) for word in words):
        return "|".join(words)
    return {int: "N", float: "NUMBER", Path: "FILE"}.get(annotation, "TEXT")


def option_row(option: Any) -> tuple[str, str]:
    names = ", ".join([*option.opts, *option.secondary_opts])
    cell = code(f"{names} {kind(option)}".strip())
    text = as_code(option.help or "")
    if option.envvar:
        text += f" Also as `{option.envvar}`."
    default = option.default
    if option.show_default is True and not option.is_flag and default not in (None, "", ()):
        text += f" Default: `{getattr(default, 'value', default)}`."
    if option.required:
        text += " Required."
    return cell, text.strip()


def command_section(name: str, command: Any, level: str) -> str:
    """One command: its usage, its help, its options by group."""
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    shown = []
    for one in arguments:
        word = str(one.metavar or one.name.upper())
        shown.append(word if one.required else f"[{word}]")
    usage = code(" ".join(["llmctl", name, "[OPTIONS]", *shown]))
    groups: dict[str, list[tuple[str, str]]] = {}
    for one in command.params:
        if one.param_type_name != "argument" and "--help" not in one.opts and not one.hidden:
            panel = one.rich_help_panel or "option"
            groups.setdefault(panel, []).append(option_row(one))
    parts = [f"{level} {name}", usage]
    parts += [fill(as_code(text), 100) for text in (command.help or "").split("\n\n")]
    parts += [table((panel.lower(), "meaning"), rows) for panel, rows in groups.items()]
    return joined(parts)


def commands() -> str:
    parts = []
    for name in main.COMMANDS:
        command = main._load(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            parts.append(command_section(name, command, "##"))
        else:
            about = main.COMMANDS[name].help
            parts.append(f"## {name}\n\n{about[0].upper()}{about[1:]}.")
            parts += [command_section(f"{name} {one}", sub, "###") for one, sub in inner.items()]
    return joined(parts)


# The recipe


def of_type(spec: Mapping[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "enum" in spec:
        return ", ".join(code(str(value)) for value in spec["enum"])
    if "const" in spec:
        return code(str(spec["const"]))
    if "anyOf" in spec:
        return " or ".join(of_type(one) for one in spec["anyOf"] if one.get("type") != "null")
    if "$ref" in spec:
        return "a section"
    word = str(spec.get("type", "any"))
    if word == "array":
        return f"list of {of_type(spec.get('items', {}))}"
    word = {"object": "keys and values", "string": "text", "boolean": "true or false"}.get(
        word, word
    )
    bounds = [
        f"{sign} {spec[key]:,}"
        for key, sign in (
            ("exclusiveMinimum", ">"),
            ("minimum", ">="),
            ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        if key in spec
    ]
    return " ".join([word, *bounds])


def section_of(spec: Mapping[str, Any]) -> str:
    """The model of a key that is a section; '' for other keys."""
    found = re.search(r"#/\$defs/(\w+Spec)", json.dumps(spec))
    return found[1] if found else ""


def key_rows(section: Mapping[str, Any], *, inner: bool = True) -> list[tuple[str, ...]]:
    """A row for each key of a section; `inner`: also for those that are sections themselves."""
    rows: list[tuple[str, ...]] = []
    without_gpu = section.get("anyOf", [{}])[-1].get("required", ())
    for name, spec in section["properties"].items():
        if section_of(spec) and not inner:
            continue
        default = spec.get("default")
        shown = "required" if name in section.get("required", ()) else ""
        if name in without_gpu:
            shown = "required without `gpu`"
        if default not in (None, "", {}, []):
            shown = code(json.dumps(default).strip('"'))
        rows.append((code(name), of_type(spec), shown, str(spec.get("description", ""))))
    return rows


def key_tables(models: Mapping[str, Any], path: str, model: str, level: str) -> list[str]:
    """The table of a section's keys, and those of the sections in it."""
    section = models[model]
    head = ("key", "value", "default", "meaning")
    text = fill(" ".join(section["description"].split()), 100)
    parts = [f"{level} {path}", text, table(head, key_rows(section))]
    for name, spec in section["properties"].items():
        if section_of(spec):
            parts += key_tables(models, f"{path}.{name}", section_of(spec), level + "#")
    return parts


def recipe() -> str:
    schema = Recipe.model_json_schema()
    head = ("key", "value", "default", "meaning")
    parts = ["## At the top", table(head, key_rows(schema, inner=False))]
    sections = {
        name: section_of(spec) for name, spec in schema["properties"].items() if section_of(spec)
    }
    for name, model in sections.items():
        parts += key_tables(schema["$defs"], name, model, "###")
        if name == "profile":
            metrics = sorted({key.split("_")[0] for key in SLA_KEYS})
            statistics = list(dict.fromkeys(key.split("_")[1] for key in SLA_KEYS))
            parts += [
                "### sla",
                fill(
                    "Latency targets, in seconds: `METRIC_STATISTIC_s`. Metrics: "
                    f"{', '.join(map(code, metrics))}. Statistics: "
                    f"{', '.join(map(code, statistics))}. Tuning maximizes the requests per second "
                    "that meet all of them.",
                    100,
                ),
            ]
    return joined(parts)


# Policies


def limits(parameter: Parameter) -> str:
    if parameter.choices:
        return ", ".join(map(code, parameter.choices))
    low, high = f"{parameter.low:g}", f"{parameter.high:g}"
    return f">= {low}" if high == "inf" else f"{low} .. {high}"


def policies() -> str:
    rows: list[tuple[str, ...]] = []
    for name, about in ABOUT.items():
        where = "simulations only" if name in ORACLES else ""
        if name in BUILT_IN:
            where = f"engine `{BUILT_IN[name].engine}`"
        rows.append((f"[`{name}`](#{name})", about.does, about.source, where))
    parts = [table(("policy", "what it does", "source", "runs"), rows)]
    head = ("parameter", "default", "allowed", "searched", "meaning")
    for name in ABOUT:
        of_policy = KNOWN[name]
        found: list[tuple[str, ...]] = []
        for key, parameter in declared(of_policy).items():
            value = defaults(of_policy).get(key, "")
            boolean = isinstance(value, bool)
            shown = f"{value:g}" if type(value) in (int, float) else str(value).lower()
            searched = "{:g} .. {:g}".format(*parameter.search) if parameter.search else ""
            searched += ", log" if parameter.search and parameter.log else ""
            allowed = "`true`, `false`" if boolean else limits(parameter)
            found.append((code(key), shown, allowed, searched, parameter.doc))
        parts += [f"## {name}", table(head, found) if found else "It has no parameters."]
    return joined(parts)


# Metrics


def families() -> Iterator[Metric]:
    """What /metrics has, without a server."""
    worker = Worker(0, unit_step(), ZetaMemory(1000))
    scheduler = Scheduler(make_policy("slice", {}), [worker])
    driver = Driver(scheduler, cast(Workers, SimpleNamespace(size=1)), Stats())
    labels = {"model_name": "model"}
    yield from engine_families(driver, labels)
    yield from families_of_requests(driver.stats, labels)


def metrics() -> str:
    rows: list[tuple[str, ...]] = []
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = sorted(
            {key for one in family.samples for key in one.labels} - {"model_name", "le"}
        )
        rows.append((code(name), family.type, ", ".join(map(code, labels)), family.documentation))
    return joined(["## On /metrics", table(("metric", "type", "labels", "meaning"), sorted(rows))])


# Releases of vLLM


def vllm_versions() -> str:
    results = shipped_results()
    compared = [
        (
            one.vllm,
            one.date,
            row.kind,
            f"`{row.scheduler}`",
            f"{row.workloads:,}",
            f"{row.passes:,}",
            f"{row.differing:,}",
        )
        for one in results
        for row in one.rows
    ]
    head = ("vLLM", "date", "kind of model", "vLLM's class", "workloads", "passes", "differ")
    refused = [(one.vllm, kind, why) for one in results for kind, why in one.refused.items()]
    parts = [table(head, compared)]
    if refused:
        parts += ["## Refused by name", table(("vLLM", "kind of model", "why"), refused)]
    parts.append("## Flags and metrics that came and went")
    changes: list[tuple[str, ...]] = []
    for before, after in pairwise(results):
        for what, old, new in (
            ("flags", before.flags, after.flags),
            ("metrics", before.metrics, after.metrics),
        ):
            came = ", ".join(map(code, sorted(set(new) - set(old))))
            went = ", ".join(map(code, sorted(set(old) - set(new))))
            if came or went:
                changes.append((after.vllm, what, came, went))
    parts.append(table(("vLLM", "", "came", "went"), changes))
    parts.append("## What llmctl touches inside vLLM")
    needs = [
        f"- `{need}`: to {one.what}. Without it: {one.without}."
        for need, one in CAPABILITIES.items()
    ]
    parts.append("\n".join(needs))
    named = [(code(one.words), one.kind, ", ".join(one.needs), one.since) for one in TOUCHED]
    parts.append(table(("what", "", "needed for", "since"), named))
    lacks = [(one.vllm, code(item), why) for one in results for item, why in one.missing.items()]
    if lacks:
        parts += ["## What a release lacks", table(("vLLM", "what", "why"), lacks)]
    return joined(parts)


# Exit codes and variables


def exit_codes() -> str:
    tree = [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.LlmctlError)
    ]
    tree.sort(key=lambda one: (one.exit_code, len(one.__mro__), one.__name__))
    rows: list[tuple[str, ...]] = [("0", "", "Done.")]
    for one in tree:
        about = " ".join(inspect.getdoc(one).split("\n\n")[0].split())  # type: ignore[union-attr]
        rows.append((str(one.exit_code), code(one.__name__), about))
    rows.append(
        ("130", "", "Interrupted with Ctrl-C; the message says what is kept. Servers drain first.")
    )
    rows.append(
        ("141", "", "The reader of the output left, as in `llmctl recipes`, piped to `head`.")
    )
    return table(("code", "class in `toolkit.errors`", "meaning"), rows)


def variables() -> str:
    head = ("variable", "meaning")
    return joined(
        [
            table(head, [(code(name), text) for name, text in VARIABLES.items()]),
            "## Of others",
            table(head, [(code(name), text) for name, text in OTHERS.items()]),
            "A key in a variable is not in the list of processes; `serve` also removes it from "
            "its own\nenvironment, so that workers and `/proc` do not have it.",
        ]
    )


def engines() -> str:
    rows: list[tuple[str, ...]] = []
    for name, traits in ENGINES.items():
        told = [
            ("a server of its own", traits.server),
            ("not started by `serve`", not traits.started),
            ("continuous policies", traits.keeps_rows or traits.hosts_policies),
            ("tensor parallelism", traits.shares_model),
            ("for tests", traits.for_tests),
        ]
        extra = f"`{install(traits.extra)}`" if traits.extra else ""
        keys = ", ".join(map(code, traits.settings))
        can = ", ".join(text for text, holds in told if holds)
        rows.append((code(name), traits.summary, can, keys, extra))
    return table(("engine", "what it is", "", "keys of its own", "install"), rows)


def models() -> str:
    """Each family with a model of it that tests compare with vLLM's own classes."""
    file = HERE.parent / "tests" / "data" / "families.json"
    by_family: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["models"]:
        by_family.setdefault(facts_of(row["config"]).family, []).append(row)
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys(family.name for family in FAMILIES.values()):
        rows += [(name, *_of_model(row)) for row in by_family[name]]
    kinds = ", ".join(map(code, sorted(FAMILIES)))
    head = ("family", "compared", "10^9", "off", "KV/token", "caches", "recipe new", "laws")
    return f"{table(head, rows)}\n\nKnown values of `model_type`: {kinds}."


def _of_model(row: Mapping[str, Any]) -> tuple[str, ...]:
    config = row["config"]
    facts = facts_of(config)
    off = f"{100 * (facts.parameters / row['parameters'] - 1):+.3f} %"
    groups = groups_of_config(config, facts.dtype, longest=facts.context)
    caches = "MLA" if facts.special.latent else "not known" if groups is None else "one"
    if groups is not None and not is_plain(groups):
        kinds = dict.fromkeys(group.kind for group in groups)
        many = "s" if len(groups) > 1 else ""
        caches = f"{len(groups)} group{many}: {', '.join(kinds)}"
    longest = min(facts.context, MODEL_LEN)
    refuses = [one.what for one in refused(of_recipe(config, [TEXT_ONLY], longest))]
    made = "yes, as text" if senses_of(config) else "yes"
    if not refuses and refused(of_recipe(config, [TEXT_ONLY], facts.context)):
        made += f", up to {longest:,} tokens"
    missing = not_computed(config, longest, facts.scheme) or refuses
    small = f"a small {code(facts.model_type)}"
    return (
        row["name"] if "/" in row["name"] else small,
        f"{facts.parameters / 1e9:.4g}" if facts.parameters > 1e8 else "",
        off,
        f"{facts.kv_bytes_per_token:,}",
        caches,
        f"no: {', '.join(refuses)}" if refuses else made,
        f"no: {', '.join(missing)}" if missing else _gpus_with_laws(config),
    )


def _gpus_with_laws(config: Mapping[str, Any]) -> str:
    """Return on which of the measured GPUs operators know a model's layers in 16 bits."""
    found = FoundModel("a", "a", "", {**config, "quantization_config": None}, "a test")
    shapes = shapes_of(new_recipe(found, Wish(GPUS["b300"], gpus=64)).recipe())
    known, unknown = [], []
    for gpu in measured_operators():
        try:
            measured_operators()[gpu].pass_seconds(shapes, [StepShape(1, 1)])
            known.append(gpu)
        except InputError:
            unknown.append(gpu)
    fewer = f"all but {', '.join(unknown)}" if len(unknown) < len(known) else ", ".join(known)
    return fewer if unknown else "all"


def python_api() -> str:
    """The names that `toolkit.api` exports: signature and docstring."""
    parts = []
    for name in sorted(api.__all__, key=lambda one: (one[0].isupper(), one.lower())):
        found = getattr(api, name)
        doc = inspect.getdoc(found) or ""
        parts.append(f"## {name}")
        if inspect.isfunction(found):
            shape = inspect.signature(found)
            lines = [f"    {one},".replace("'", "") for one in shape.parameters.values()]
            star = next(
                (
                    k
                    for k, one in enumerate(shape.parameters.values())
                    if one.kind is one.KEYWORD_ONLY
                ),
                None,
            )
            if star is not None:
                lines.insert(star, "    *,")
            shown = "\n".join(
                [f"{name}(", *lines, f") -> {shape.return_annotation}".replace("'", "")]
            )
            parts.append(f"```python\n{shown}\n```")
        parts.append(f"From `{found.__module__}`." if found.__module__ != api.__name__ else "")
        parts.append(plain(doc))
        for method in ("run", "metrics", "admissible", "admit", "longest_pass"):
            inner = vars(found).get(method) if inspect.isclass(found) else None
            if inner is not None and inspect.isfunction(inner):
                signature = code(f"{method}{inspect.signature(inner)}".replace("'", ""))
                parts += [f"### {name}.{method}", signature, plain(inspect.getdoc(inner) or "")]
    return joined(parts)


def plain(doc: str) -> str:
    """A docstring as paragraphs of 100 columns."""
    return "\n\n".join(fill(" ".join(one.split()), 100) for one in doc.split("\n\n") if one)


PAGES: dict[str, tuple[str, str, str, Callable[[], str]]] = {
    "commands": (
        "the commands",
        "Commands",
        "Every command and option. `llmctl COMMAND --help` shows the same. A command that prints a "
        "result takes\n`--json`.",
        commands,
    ),
    "recipe-keys": (
        "the recipe's JSON Schema",
        "Keys of a recipe",
        "What a recipe may say, by section. [Recipes](recipe.md) explains how to write one.",
        recipe,
    ),
    "policies": (
        "the policies' parameters",
        "Policies and their parameters",
        "`--set KEY=VALUE` sets a parameter; `llmctl tune` searches those with a range. "
        "[How each policy decides](../explanation/policies.md).",
        policies,
    ),
    "metrics": (
        "the server's registry",
        "Metrics",
        "What `/metrics` has. Every series has the label `model_name`. "
        "[Which one to watch](../how-to/serve.md#watch-it). The metrics of simulations and of "
        "replays are in [simulation](simulation.md); how two of them are counted:\n\n"
        "## Throughput and goodput\n\n"
        "`throughput_rps` counts requests that ended well, `goodput_rps` those that met every "
        "target, and both are divided by the same seconds. These are the window in which the "
        "requests arrive, where the server keeps up: how long the last requests take says nothing "
        "of the server, and the less the longer a run is. Where the queue grows with the trace "
        "(`behind_percent` above 5), and where arrivals have no rate (one request, all at once, a "
        "closed loop), they are the makespan, from the first arrival to the last end, as `vllm "
        "bench serve` has it. [Why]"
        "(../decisions.md#throughput-and-goodput-share-their-time).",
        metrics,
    ),
    "exit-codes": (
        "`toolkit/errors.py`",
        "Exit codes",
        "What a command's exit code says. [Messages, and what to do](errors.md).",
        exit_codes,
    ),
    "environment": (
        "`docs/make_reference.py`, which a test compares with the code",
        "Environment variables",
        "What llmctl reads from the environment.",
        variables,
    ),
    "python": (
        "`toolkit/api.py`",
        "The Python API",
        "`from toolkit import api`. What it exports keeps its meaning within a minor version. "
        "[How to use it](../how-to/simulate-in-python.md).",
        python_api,
    ),
    "vllm-versions": (
        "results of `llmctl vllm-check` and `toolkit/backends/vllm/touched.py`",
        "Releases of vLLM",
        "How the simulator's model of vLLM's scheduler compares with each release, pass by pass, "
        "and what\nllmctl touches inside vLLM. `llmctl vllm-check` does the same with yours.",
        vllm_versions,
    ),
    "models": (
        "`toolkit/catalogue/data/families.yaml` and the configs of `tests/test_families.py`",
        "Families of models",
        "What is known of a model from its config.json alone. *compared*: a model that vLLM 0.32's "
        "own\nclasses count, too (*off*: by how much llmctl's parameters differ); "
        "[more of them](../results/vllm.md#sizes-of-families-against-vllms-own-classes).\n"
        "*KV/token*: bytes in 16 bits, of all layers that cache tokens. *recipe new*: whether a "
        "recipe is made; *as text*: with\n`--language-model-only`. *laws*: on which of the "
        "measured GPUs operators know its layers in 16 bits (`profile --analytic`).\nA type that "
        "is not here is counted by "
        "[the general rule](../how-to/recipe-for-my-model.md#what-is-refused).",
        models,
    ),
    "engines": (
        "`toolkit/engine_traits.py`",
        "Engines",
        "What each engine can do. [How each works](../explanation/engines.md).",
        engines,
    ),
}


def page(name: str) -> str:
    """The text of a page."""
    source, title, about, content = PAGES[name]
    text = NOTE.format(source=source, title=title, about=about) + content()
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE) + "\n"


def make(check: bool) -> int:
    """Write the pages, or with `check` say which are not current; the exit code."""
    old = []
    for name in PAGES:
        file, text = HERE / "reference" / f"{name}.md", page(name)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            old.append(file.name)
            if not check:
                file.write_text(text, encoding="utf-8")
    word = "not current, run `make reference`" if check else "written"
    print(f"docs/reference: {', '.join(old)}: {word}" if old else "docs/reference is current")
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(make("--check" in sys.argv))
