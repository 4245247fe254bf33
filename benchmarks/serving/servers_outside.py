"""Servers behind URLs, predicted beside measured: transformers' `serve`, llmctl's, llama.cpp's.

    python -m benchmarks.serving.servers_outside --work DIR --trace azure.csv --accelerate FOLDER

Takes a profile and several replayed windows for each server. Needs a quiet machine, a trace, and
accelerate for transformers' `serve`: `pip install --no-deps --target FOLDER accelerate`.

Each server is started; then come `llmctl profile` of a recipe with `engine: {name: openai, url:
...}`, `fit`, `render`, and `llmctl validate` on windows of the trace, each predicted before it is
replayed. All measurements stay in DIR/SERVER. The model is the tiny Llama with random weights, one
thread each. llmctl's own server needs a fit of its own to serve with; the stage `prepare` makes it,
and is not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser, publish
from benchmarks.common.gguf_file import write_llama
from benchmarks.serving.servers_outside_table import about, between, table
from toolkit.endpoints.target import WORDS
from toolkit.files.bench import Validation
from toolkit.files.io import read_file
from toolkit.files.profile import Profile
from toolkit.files.shipped import load_recipe

LLMCTL = (sys.executable, "-m", "toolkit")
STAGES = ("prepare", "profile", "validate", "report")
OURS = ROOT / "recipes" / "tiny-llama-cpu-rebatch.yaml"
BLOCKS = 512
BLOCK_TOKENS = 32
PASS_TOKENS = 512
SLOTS = 16  # of llama.cpp: requests at once
TRANSFORMERS = (
    "--continuous-batching --device cpu --dtype float32 --attn-implementation sdpa"
    f" --cb-block-size {BLOCK_TOKENS} --cb-num-blocks {BLOCKS} --cb-max-batch-tokens {PASS_TOKENS}"
    " --no-cb-use-cuda-graph --log-level warning"
)
LLAMA_CPP = (
    f"-t 1 -tb 1 -np {SLOTS} -ctk f32 -ctv f32 -c {BLOCKS * BLOCK_TOKENS} -ub {PASS_TOKENS}"
    " --no-kv-unified --no-webui"
)
OWN_SERVER = (
    "serve server.yaml --fit server-fit.json --port 0 --json --allow-end-after --force"
    " --shutdown-timeout 1"
)
VOCABULARY = 512
START_S = 120.0
Arguments = argparse.Namespace


def run(folder: Path, *words: str) -> None:
    """Run an llmctl command in a folder."""
    print("$ llmctl", *words, file=sys.stderr, flush=True)
    subprocess.run([*LLMCTL, *words], cwd=folder, check=True)


@contextmanager
def process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] = {}, piped: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A server until the block ends, with its output in serve.log, except stdout if `piped`.

    An unread pipe is full after 64 KiB of a request log, and then the server stalls.
    """
    with (folder / "serve.log").open("a") as log:
        stdout = subprocess.PIPE if piped else log
        env = {**os.environ, **environment}
        server = subprocess.Popen(
            command, cwd=folder, env=env, stdout=stdout, stderr=log, text=True
        )
        try:
            yield server
        finally:
            server.terminate()
            server.wait()


@contextmanager
def transformers(arguments: Arguments) -> Iterator[str]:
    """transformers' `serve` with continuous batching; its URL."""
    folder = arguments.work / "transformers"
    url = f"http://127.0.0.1:{arguments.port}"
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder / "model")]
    command += [*TRANSFORMERS.split(), "--port", str(arguments.port)]
    (folder / "hf" / "hub").mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": str(arguments.accelerate), "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(folder / "hf")
    with process(command, folder, environment) as server:
        _wait(f"{url}/health", server)
        yield url


@contextmanager
def llmctl(arguments: Arguments) -> Iterator[str]:
    """`llmctl serve` with the engine `rebatch`, under Past-Future; its URL."""
    folder = arguments.work / "llmctl"
    with process([*LLMCTL, *OWN_SERVER.split()], folder, piped=True) as server:
        assert server.stdout is not None
        url = str(json.loads(server.stdout.readline())["url"])
        _wait(f"{url}/ready", server)
        yield url


@contextmanager
def llama_cpp(arguments: Arguments) -> Iterator[str]:
    """llama.cpp's server, float32 weights and cache; its URL."""
    folder = arguments.work / "llama.cpp"
    url = f"http://127.0.0.1:{arguments.port}"
    command = [str(arguments.llama_server), "-m", str(folder / "model.gguf"), "--host", "127.0.0.1"]
    command += ["--port", str(arguments.port), *LLAMA_CPP.split()]
    with process(command, folder) as server:
        _wait(f"{url}/health", server)
        yield url


def _wait(url: str, server: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and server.poll() is None:
        try:
            if httpx.get(url, timeout=1.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer; see serve.log")


SERVERS: dict[str, Callable[[Arguments], Any]] = {
    "transformers": transformers,
    "llmctl": llmctl,
    "llama.cpp": llama_cpp,
}


def prepare(arguments: Arguments, server: str) -> None:
    """Recipes, the model on disk, and the fit for llmctl's own server. Existing files stay."""
    folder = arguments.work / server
    folder.mkdir(parents=True, exist_ok=True)
    if server == "llmctl" and not (folder / "server-fit.json").exists():
        recipe = load_recipe(OURS).model_dump(mode="json", exclude_unset=True)
        recipe |= {"name": "server", "workers": 1}
        recipe["engine"].pop("flush_s")
        recipe["profile"] |= {"batch_sizes": [1, 4, 16], "input_lengths": [16, 128, 448]}
        recipe["profile"] |= {"cached_lengths": [16, 128, 448], "slices": 6, "sequences": 6}
        recipe["profile"]["repeats"] = 1
        (folder / "server.yaml").write_text(json.dumps(recipe, indent=1))
        run(folder, "profile", "server.yaml", "--out", "server-profile.json", "--fresh")
        run(folder, "fit", "server-profile.json", "--out", "server-fit.json")
    if server != "llmctl" and not (folder / "model").exists():
        save_model(folder / "model")
    if server == "llama.cpp" and not (folder / "model.gguf").exists():
        config = json.loads((folder / "model" / "config.json").read_text())
        weights = load_file(folder / "model" / "model.safetensors")
        write_llama(folder / "model.gguf", config, weights)


def recipe_of(arguments: Arguments, server: str, url: str) -> str:
    """The recipe of a server behind a URL, as JSON, which is YAML."""
    base = load_recipe(OURS).model_dump(mode="json", exclude_unset=True)
    engine: dict[str, object] = {"name": "openai", "url": url, "threads": 1}
    policy: dict[str, object] = {"name": "past-future"}
    if server != "llmctl":  # it says what its cache holds
        engine["kv_cache_memory_mib"] = 64
        watermark = 0.85 if server == "transformers" else 1.0
        parameters = {"interval_steps": 1, "watermark": watermark, "chunk_tokens": PASS_TOKENS}
        policy = {"name": "aggressive", "parameters": parameters}
    if server == "transformers":
        engine["served_model"] = str(arguments.work / server / "model")
    grid = {"batch_sizes": [1, 2, 3, 4, 6, 8], "input_lengths": [32, 128, 384]}
    grid |= {"cached_lengths": [64, 192, 320], "memory_lengths": [64], "slice_tokens": [16, 64]}
    how = {"slices": 6, "repeats": arguments.repeats, "warmups": 1, "clock": "wall"}
    recipe = {key: base[key] for key in ("model", "hardware", "sla")}
    recipe |= {"schema_version": 1, "name": f"{server}-from-outside", "engine": engine}
    recipe |= {"profile": grid | how, "policy": policy, "serve": {"max_new_tokens": 128}}
    return json.dumps(recipe, indent=1)


def profile(arguments: Arguments, server: str, url: str) -> None:
    """The steps from a recipe to a plan."""
    folder = arguments.work / server
    (folder / "outside.yaml").write_text(recipe_of(arguments, server, url))
    run(folder, "profile", "outside.yaml", "--out", "profile.json", "--fresh")
    run(folder, "fit", "profile.json", "--out", "fit.json", "--points")
    run(folder, "render", "outside.yaml", "--fit", "fit.json", "--out", "plan.json")


def validate(arguments: Arguments, server: str, url: str) -> None:
    """Replay the windows."""
    words = ["--url", url, "--trace", str(arguments.trace), "--rate", f"{arguments.rate:g}"]
    words += ["--windows", str(arguments.windows), "--window", f"{arguments.window:g}"]
    words += ["--warmup", f"{arguments.warmup:g}", "--seed", str(arguments.seed)]
    if server == "transformers":
        words += ["--model", str(arguments.work / server / "model")]
    name = f"validation-{arguments.seed}"
    words += ["--out", f"{name}.json", "--save-requests", f"{name}.jsonl"]
    run(arguments.work / server, "validate", "plan.json", *words)


def save_model(folder: Path) -> None:
    """The tiny Llama with a tokenizer of words, which llmctl sends to a server that takes no token
    ids.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = load_recipe(OURS).model.config
    names = ["<pad>", "<s>", "</s>", "<unk>", *dict.fromkeys(WORDS)]
    names += [f"w{number}" for number in range(VOCABULARY - len(names))]
    vocabulary = {name: token for token, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    # no end: outputs have the requested length
    special = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    made = AutoConfig.for_model(**{"model_type": "llama"} | config | special)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def report(arguments: Arguments) -> str:
    """The tables as markdown."""
    windows = f"Windows of {arguments.window:g} s at {arguments.rate:g} requests/s"
    cells = "measured / predicted: the prediction's error; TTFT, TPOT and E2E are means in ms"
    warm_up = f"each after {arguments.warmup:g} s of other requests"
    lines = [f"{windows}, {warm_up}. Cells are {cells}.", ""]
    for server in arguments.servers:
        folder = arguments.work / server
        found = read_file(Validation, folder / f"validation-{arguments.seed}.json")
        facts = read_file(Profile, folder / "profile.json")
        sides = between(folder, found, arguments.seed)
        lines += [about(server, facts, found), "", *table(found, sides), ""]
    return "\n".join(lines)


def options(words: Sequence[str] | None = None) -> Arguments:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--work", type=Path, required=True, help="a folder for all that is made and measured"
    )
    parser.add_argument("--trace", type=Path, required=True, help="a trace's file")
    parser.add_argument(
        "--accelerate", type=Path, default=Path(), help="the folder that has accelerate"
    )
    parser.add_argument(
        "--servers", nargs="+", choices=SERVERS, metavar="NAME", default=["transformers", "llmctl"]
    )
    parser.add_argument(
        "--llama-server",
        type=Path,
        default=Path("llama-server"),
        help="llama.cpp's, if it is asked for",
    )
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=float, default=20.0, help="seconds of each")
    parser.add_argument(
        "--warmup", type=float, default=15.0, help="seconds of other requests before each"
    )
    parser.add_argument("--repeats", type=int, default=2, help="of the profile's points")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the windows' places and the prompts"
    )
    parser.add_argument("--port", type=int, default=8771, help="of servers that take no free one")
    parser.add_argument("--stages", nargs="+", choices=STAGES, metavar="NAME", default=list(STAGES))
    parser.add_argument("--write", type=Path, help="replace the section of this file of results")
    found = parser.parse_args(words)
    found.work, found.trace, found.accelerate = (
        path.absolute() for path in (found.work, found.trace, found.accelerate)
    )
    return found


def main() -> None:
    arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with us
    os.environ["OMP_NUM_THREADS"] = "1"
    for server in arguments.servers:
        if "prepare" in arguments.stages:
            prepare(arguments, server)
        if not {"profile", "validate"} & set(arguments.stages):
            continue
        with SERVERS[server](arguments) as url:
            if "profile" in arguments.stages:
                profile(arguments, server, url)
            if "validate" in arguments.stages:
                validate(arguments, server, url)
    if "report" in arguments.stages:
        text = report(arguments)
        publish(text, arguments.write, "servers_outside", "Servers from outside")


if __name__ == "__main__":
    main()
