"""A Python with a stand-in for vLLM, for benchmarks of a front that starts its servers itself.

`llmctl serve` starts it as it starts vLLM: `python ... vllm serve MODEL --flags`. The server is
`benchmarks.common.standin`, and /metrics has its `--max-num-seqs`. A model named 'dies' ends while
it loads.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import signal
import sys
import textwrap
from pathlib import Path

from benchmarks.common.standin import StandIn

VERSION = "0.32.0"
TOKEN_S = "STANDIN_TOKEN_S"


def install(
    folder: Path, module: str = __name__, *, version: str = VERSION, token_s: float = 0.004,
    distribution: str = "vllm",
) -> str:  # fmt: skip
    """Make it in `folder`, as if `distribution` had installed it: its command runs `main` of
    `module`. Returns the path of its Python.
    """
    site = folder / "site"
    package = site / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for each in (site / "vllm", site / "vllm" / "entrypoints", package):
        (each / "__init__.py").touch()
    (package / "main.py").write_text(f"from {module} import main\n")
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    python = folder / "python"
    here = Path(str(sys.modules[module].__file__)).resolve().parents[module.count(".")]
    root = Path(__file__).resolve().parents[2]
    python.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        export {TOKEN_S}={token_s}
        PYTHONPATH="$PYTHONPATH:{site}:{here}:{root}" exec {sys.executable} "$@"
        """)
    )
    python.chmod(0o755)
    return str(python)


async def serve() -> None:
    """Serve until SIGTERM, as the words of the command say."""
    _, verb, model, *words = sys.argv
    assert verb == "serve"
    if model == "dies":
        raise SystemExit("ValueError: the stand-in dies")
    flags = dict(zip(words, [*words[1:], ""], strict=True))
    server = StandIn(
        token_s=float(os.environ[TOKEN_S]),
        model=flags["--served-model-name"],
        port=int(flags["--port"]),
        metrics=f"standin:max_num_seqs {flags['--max-num-seqs']}\n",
    )
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await server.start()
    await ended.wait()
    server.kill()


def main() -> None:
    importlib.metadata.version("vllm")  # as vLLM's own does, for --version
    asyncio.run(serve())
