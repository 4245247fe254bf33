"""Measure, tune and serve a tiny model on this machine, then compare it with fixed batches.

`python examples/demo.py`, or `make demo`: five minutes. Each step is a command that a user would
type; its files stay in `--out`. A machine that others use is slower than when it was profiled: so
`bench --load` measures its speed again, and replays a rate that the plan keeps at that speed.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.cli.output import paragraph, table
from toolkit.units import seconds

BROKEN, LATE = 5, 6  # exit codes: no setting keeps all limits; the client was late
OVERLOAD = 2.5  # rate of arrivals, as a multiple of what the tuned policy can serve
FIXED_ROWS = 12  # of SLS: as many of the longest requests as surely fit into the memory
COMPARED = ("throughput_rps", "goodput_rps", "ttft_mean_s", "e2e_mean_s", "e2e_p95_s")
CACHED = ("hit_percent", "throughput_rps", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s")


def start(*words: object, end: str = "", ask: bool = False) -> subprocess.Popen[bytes]:
    """Show a command and start it; if `ask`, what it prints can be read."""
    line = [str(word) for word in words]
    print(f"$ llmctl {shlex.join(line)}{end}", flush=True)
    pipe = subprocess.PIPE if ask else None
    return subprocess.Popen([sys.executable, "-m", "toolkit", *line], stdout=pipe)


def llmctl(*words: object, ask: bool = False) -> Any:
    """Run a command. Return its exit code, or if `ask` what it prints with --json."""
    with start(*words, *["--json"] * ask, ask=ask) as process:
        text = process.communicate()[0]
    if process.returncode not in (0, BROKEN, LATE):
        sys.exit(process.returncode)
    return json.loads(text) if ask else process.returncode


@contextmanager
def served(plan: Path) -> Iterator[str]:
    """Serve a plan until the block ends; yields the URL once the server is ready."""
    words = ["serve", plan, "--port", 0, "--allow-end-after", "--json"]
    with start(*words, end=" &", ask=True) as server:
        try:
            ready = server.stdout.readline() if server.stdout else b""
            yield json.loads(ready)["url"] if ready else sys.exit("the server did not start")
        finally:
            server.terminate()


def show_promise(tuning: Any, bench: Any) -> str:
    """Print what was promised, predicted and measured; return which targets were kept, in words."""
    rate, tuned_rate = (f"{one['request_rate_rps']:.3g} requests/s" for one in (bench, tuning))
    outcome = tuning["defaults" if tuning["keep_defaults"] else "best"]["outcome"]
    promised = outcome["metrics"] | {
        name: outcome["used"][name] * limit_s for name, limit_s in bench["sla"].items()
    }
    if rate != tuned_rate:  # `tune` said nothing of this rate
        promised = {}
    rows: list[list[Any]] = []
    for name, limit_s in bench["sla"].items():
        shares = [bench[part]["used"][name] for part in ("predicted", "measured")]
        values = [limit_s, promised.get(name), *(share * limit_s for share in shares)]
        rows.append([name, *values, "yes" if shares[1] <= 1.0 else "NO"])
    broken = [row[0] for row in rows if row[-1] == "NO"]
    text = f"broke {', '.join(broken)}" if broken else f"kept all {len(rows)} targets"
    for name in ("goodput_rps", "throughput_rps", "sla_attainment_percent"):
        values = [bench[part]["metrics"].get(name) for part in ("predicted", "measured")]
        rows.append([name, None, promised.get(name), *values, None])
    at = "the tuned rate" if promised else "the speed of now"
    columns = ["", ">limit", ">tune said", ">predicted", ">measured", "kept"]
    table(columns, rows, f"what tune promised, at {at}: {rate}")
    slow = f"{bench['replay_slowdown'] or 1.0:.2f} times as long as fitted; tuned for {tuned_rate}"
    return f"At {rate} the tuned server {text}" + f" (batches took {slow})" * (not promised)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="tiny-llama-cpu")
    parser.add_argument("--trace", default="chat-small")
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    parser.add_argument("--scale", type=float, default=1.0, help="of the seconds of all replays")
    given = parser.parse_args()
    recipe, out, scale = given.recipe, given.out, given.scale
    out.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    names = ("profile.json", "fit.json", "tuning.json", "plan.json", "plan-sls.json")
    profile, fit, tuning, plan, plan_sls = (out / name for name in names)
    late: list[str] = []

    def bench(name: str, url: str, plan: Path, *part: object) -> Any:
        words = ["--url", url, "--plan", plan, "--trace", given.trace, *part]
        if llmctl("bench", *words, "--warmup", 12 * scale, "--out", out / name) == LATE:
            late.append(name)
        return json.loads((out / name).read_text(encoding="utf-8"))

    print("\n== 1/7  measure the engine")
    llmctl("profile", recipe, "--out", profile)
    print("\n== 2/7  fit how time and memory behave")
    llmctl("fit", profile, "--out", fit)
    print("\n== 3/7  search the scheduler's parameters on the trace")
    basis = ["--fit", fit, "--trace", given.trace]
    broken = llmctl("tune", recipe, *basis, "--load", 0.7, "--out", tuning) == BROKEN
    allow = ["--force"] * broken
    print("\n== 4/7  serve what was found, at a rate that it keeps as fast as the machine is now")
    llmctl("render", recipe, "--fit", fit, "--tuning", tuning, "--out", plan, *allow)
    with served(plan) as url:
        part = ["--tuning", tuning, "--load", 0.7, "--duration", 90 * scale]
        judged = bench("bench.json", url, plan, *part)
        print("\n== 5/7  the same server at an overload")
        backlog = [recipe, *basis, "--tuning", tuning, "--rate", 1000]
        most_rps = llmctl("simulate", *backlog, ask=True)["throughput_rps"]
        rate_rps = OVERLOAD * most_rps / (judged["replay_slowdown"] or 1.0)
        part = ["--rate", f"{rate_rps:.1f}", "--duration", f"{24 * scale / OVERLOAD:.2f}"]
        scls = bench("bench-overload.json", url, plan, *part)["measured"]["metrics"]
    print("\n== 6/7  the same requests, workers and memory under sequence-level scheduling (SLS)")
    fixed = ["--policy", "sequence", "--set", f"batch_size={FIXED_ROWS}"]
    llmctl("render", recipe, "--fit", fit, *fixed, "--out", plan_sls)
    with served(plan_sls) as url:
        sls = bench("bench-sls.json", url, plan_sls, *part)["measured"]["metrics"]
    print("\n== 7/7  prompts that share a beginning: vLLM's prefix cache, simulated")
    shared = out / "shared.jsonl"
    made = ["--rate", 10, "--duration", 60, "--system-tokens", 1000, "--templates", 20]
    llmctl("trace", "generate", "--out", shared, *made)
    words = ["simulate", "llama-3.1-8b-h200", "--trace", shared, "--policies", "vllm"]
    cached = llmctl(*words, ask=True)
    whole = llmctl(*words, "--set", "prefix_caching=false", ask=True)
    llmctl("report", plan, "--out", out / "report.html")
    text = show_promise(json.loads(tuning.read_text(encoding="utf-8")), judged)
    times = {key: scls[key] / sls[key] for key in COMPARED if sls.get(key) and key in scls}
    rows = [[key, sls[key], scls[key], f"{ratio:.2f}x"] for key, ratio in times.items()]
    table(["measured live, same requests", "SLS", "SCLS, tuned", ">ratio"], rows, "under overload")
    columns = ["simulated, vLLM on an H200", ">no prefix cache", ">its default"]
    rows = [[key, whole[key], cached[key]] for key in CACHED]
    table(columns, rows, "prompts that share a beginning, computed laws")
    print(f"the demo took {seconds(time.monotonic() - began_s)}; its files are in {out}/")
    print(f"the page about it: {out / 'report.html'}\n")
    text += f", and under overload it served {times['throughput_rps']:.2f} times as much as SLS."
    paragraph(f"{text} Not the server's, as the client was late: {late}." if late else text)


if __name__ == "__main__":
    main()
