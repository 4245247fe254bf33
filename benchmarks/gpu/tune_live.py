"""Forty settings of a running vLLM on one start, within four minutes, unattended.

    python -m benchmarks.gpu.tune_live --vllm-python PYTHON --out DIR [--budget-s 240]
        [--recipe llama-3.1-8b-h200-measured] [--model FOLDER] [--rate 20]
    python -m benchmarks.gpu.tune_live --vllm-python PYTHON --out DIR --recipe tiny-llama-vllm
        --fit FIT

Needs llmctl's core with its command line, and an environment with vLLM 0.32. The second command
tries everything but CUDA, on a CPU. --model names a folder with the model's config.json, where no
hub can be reached: weights are random (`load_format: dummy`).

`llmctl serve --live` starts the server once; `llmctl tune --live` has what is left of the budget.
DIR gets plan.json, live-tuning.json, live-plan.json and the server's output; its passes are kept if
they are no more than 32 MiB. Exit codes: 0, at least 40 settings were tried; 1, fewer.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.common.command import LLMCTL, make_parser
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.cli.basis import plan_from
from toolkit.files.io import read_file, write_file
from toolkit.files.live import LiveTuning

SETTINGS_MIN = 40
END_S = 25.0  # of the budget, for the fit of the passes and the server's end
PASSES_MAX_BYTES = 32 << 20


@contextlib.contextmanager
def server(out: Path, wait_s: float) -> Iterator[str]:
    """The URL of a server of the plan; it is ended with its processes."""
    words = ["serve", str(out / "plan.json"), "--live", "--port", "0", "--json", "--force"]
    words += ["--pass-log", str(out / "passes.jsonl"), "--shutdown-timeout", "1"]
    with (out / "server.log").open("w") as log:
        child = subprocess.Popen(
            [*LLMCTL, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert child.stdout is not None
            with selectors.DefaultSelector() as waiting:
                waiting.register(child.stdout, selectors.EVENT_READ)
                if not waiting.select(wait_s):
                    raise SystemExit(f"error: the server was not ready within {wait_s:.0f} s")
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"error: the server ended; {out / 'server.log'} says why")
            yield json.loads(line)["url"]
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="llama-3.1-8b-h200-measured")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--trace", default="chat-small")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--budget-s", type=float, default=240.0)
    given = parser.parse_args()
    begun_s = time.monotonic()
    os.environ[PYTHON_VARIABLE] = given.vllm_python
    out: Path = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    plan, _ = plan_from(given.recipe, given.fit, None, force=True)
    if given.model is not None:
        model = plan.recipe.model.model_copy(update={"source": str(given.model.absolute())})
        plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"model": model})})
    write_file(plan, out / "plan.json")
    with server(out, 0.6 * given.budget_s) as url:
        ready_s = time.monotonic() - begun_s
        minutes = (given.budget_s - END_S - ready_s) / 60.0
        print(f"ready after {ready_s:.0f} s; {60 * minutes:.0f} s for bursts", flush=True)
        words = ["tune", str(out / "plan.json"), "--live", url, "--minutes", f"{minutes:.2f}"]
        words += ["--trace", given.trace, "--force"]
        words += ["--out", str(out / "live-tuning.json")]
        words += ["--plan-out", str(out / "live-plan.json")]
        words += ["--rate", str(given.rate)] if given.rate else []
        code = subprocess.run([*LLMCTL, *words], cwd=ROOT).returncode
    passes = out / "passes.jsonl"
    if passes.is_file() and passes.stat().st_size > PASSES_MAX_BYTES:
        passes.unlink()
    if code:
        return 1
    result = read_file(LiveTuning, out / "live-tuning.json")
    print(f"{len(result.trials)} settings, {time.monotonic() - begun_s:.0f} s in all")
    return 0 if len(result.trials) >= SETTINGS_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
