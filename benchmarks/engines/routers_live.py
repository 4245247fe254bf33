"""Routers live: two real vLLM replicas on two cores, each router predicted and then measured.

    python -m benchmarks.engines.routers_live --work DIR --vllm-python PYTHON [--bin FOLDER]

Takes about 25 minutes for each of `--repeats` on a quiet machine of two cores. Needs an environment
with vLLM 0.32, and for `peers` one with `pip install sglang-router vllm-router`.

The model and the sessions are those of `prefix_live`. Each replica has a core and a cache of 20,448
tokens; front and load generator take their time from the same cores. vLLM's worker polls for a
second after each pass, which would take the cores from everything else, so workers get a nice
value. After `llmctl profile` (of one vLLM) and `fit`, a plan with two replicas is made for each
router. `llmctl serve --replica` is the front, and `llmctl validate` predicts a window with what
other requests before it show of the machine's speed, replays it in closed loop, and compares. All
windows of all routers are reported, none is chosen. With `--repeats`, all run in turn, then all
again, and the tables have medians. As in `prefix_live`, a second prediction takes the speed before
and after the window.

Its stage `peers` stands our front, `sglang-router` and `vllm-router` (in the folder `--bin`) before
two such vLLM servers, and kills one of these in the middle of 40 streams. 80 streams of 150 tokens
are sent by 40 clients, each on its own connection; an answer is failed that is no 200, breaks off,
or lacks a token.

Each result is a file in DIR, and the same command continues after those that are there. `--minutes`
starts no window after so long, `--stage` runs one stage, for machines that are quiet for minutes
only. `report` prints the tables; docs/results/data/routers-live.json has its numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import psutil

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import free_ports, wait_for
from benchmarks.common.results_file import keep
from benchmarks.engines.prefix_live import (
    CLOSING,
    CLOSING_S,
    GENERATED,
    RECIPE,
    Window,
    add_live_options,
    in_folder,
    late,
    predicted,
    profile_and_fit,
    replay,
    unmeasured,
)
from benchmarks.engines.vllm_flags import LLMCTL, run, serving
from toolkit.files.bench import Validation, WindowResult
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import RouterSpec
from toolkit.routing.routers import make_router, targets_of
from toolkit.sched.policies.parameters import parameters

STAGES = ("prepare", "profile", "fit", "plans", "measure", "peers", "report")
ROUTERS = ("round-robin", "session-hash", "llm-d", "sglang", "by-law")
TRACE = "sessions"
RATES = {"sessions": 5.0}  # turns/s
SEEDS = (1, 2)
AIMS = {"throughput_rps": 5.0, "ttft_mean_s": 15.0}  # percent
HIT_AIM = 2.0  # points
WORKER = "VLLM::Worker"
POLITE = 10  # a process of vLLM, and its nice value
CLIENTS = 40
STREAMS = 80
TOKENS = 150
KILL_AT = CLIENTS * TOKENS // 5  # events of all streams
SHOWN = (*AIMS, "e2e_mean_s", "goodput_rps")
KEPT = ("hit_percent", *SHOWN, "ttft_p99_s", "tpot_mean_s", "mtpot_p99_s")


def windows_of(arguments: argparse.Namespace) -> list[Window]:
    """All windows: those of the first seed under every router, those of the next, all again, and a
    short one at the end.
    """
    windows = [
        Window(router, TRACE, seed, arguments.window, f"window-{seed}-{router}-{repeat}.json")
        for repeat in range(1, arguments.repeats + 1)
        for seed in SEEDS
        for router in ROUTERS
    ]
    return [*windows, Window(ROUTERS[-1], TRACE, SEEDS[0], CLOSING_S, CLOSING)]


def plans(arguments: argparse.Namespace) -> None:
    """A plan of two replicas with vLLM's defaults, for each router at its defaults."""
    words = ["--fit", "fit.json", "--policy", "vllm", "--out", "one.json"]
    run(arguments, "render", str(RECIPE), *words)
    plan = read_file(Plan, arguments.work / "one.json")
    for name in ROUTERS:
        router = make_router(name, targets_of(name, plan.recipe.sla))
        spec = RouterSpec(name=name, parameters=parameters(router))
        routed = plan.model_copy(update={"workers": 2, "replica_router": spec})
        write_file(routed, arguments.work / f"{name}.json")


@dataclass(slots=True, frozen=True)
class Replayed:
    """A window's result, and its prediction at the speed of other requests before and after it."""

    result: WindowResult
    both: Mapping[str, float]

    @property
    def hits(self) -> tuple[float, float]:
        """Percent of the prompt tokens that were found in the caches: measured, predicted."""
        cache = self.result.cache
        assert cache is not None
        return cache.hit_percent or 0.0, cache.predicted_percent or 0.0


def found(arguments: argparse.Namespace) -> dict[tuple[int, str], list[Replayed]]:
    """The results so far, by seed and router; of repeats the first comes first."""
    results = [
        (window, read_file(Validation, arguments.work / window.out).windows[0])
        for window in windows_of(arguments)
        if (arguments.work / window.out).exists()
    ]
    replayed: dict[tuple[int, str], list[Replayed]] = {}
    for (window, result), (_, after) in pairwise(results):
        slowdown = math.sqrt(result.slowdown * after.slowdown)
        both = predicted(arguments.work, window, result, slowdown, shares=True)
        replayed.setdefault((window.seed, window.plan), []).append(Replayed(result, both))
    return replayed


def measure(arguments: argparse.Namespace) -> None:
    """Replay the windows that have no result yet, each with a front of its own before the same two
    replicas; their caches are emptied first.
    """
    left = unmeasured(arguments, windows_of(arguments))
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    given = [word for url in urls for word in ("--replica", url)]
    with ExitStack() as both:
        for cpu, port in enumerate(ports if left else []):
            both.enter_context(vllm_on(arguments, cpu, port))
        for window in left:
            if late(arguments):
                return
            asyncio.run(wait_healthy(ports))
            for url in urls:
                httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
            with serving(arguments, f"{window.plan}.json", *given) as front:
                replay(arguments, front, window, RATES[window.trace], apart=False)


@contextmanager
def vllm_on(arguments: argparse.Namespace, cpu: int, port: int) -> Iterator[psutil.Process]:
    """One vLLM server that has the CPU to itself; killed at the end if it still runs."""
    words = ["taskset", "-c", str(cpu), *LLMCTL, "serve", "one.json", "--port", str(port)]
    environment = os.environ | {"LLMCTL_VLLM_PYTHON": arguments.vllm_python}
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # to empty its cache
    with (arguments.work / "peers.log").open("a") as log:
        server = psutil.Popen(words, cwd=arguments.work, env=environment, stdout=log, stderr=log)
        try:
            yield server
        finally:
            kill(server)


def kill(server: psutil.Process) -> None:
    """Kill a server and its processes at once."""
    with suppress(psutil.NoSuchProcess):
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    server.wait()


async def wait_healthy(ports: Sequence[int]) -> None:
    """Wait until vLLM answers on all ports. Its workers, which poll for their next pass, then yield
    to all other processes.
    """
    async with httpx.AsyncClient(trust_env=False) as http:
        for port in ports:
            for _ in range(600):
                with suppress(httpx.HTTPError):
                    if (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.25)
            else:
                raise SystemExit(f"no vLLM on port {port}; see peers.log")
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if WORKER in process.name() + " ".join(process.cmdline()):
                process.nice(POLITE)


async def failed_streams(port: int, model: str, victim: psutil.Process) -> dict[str, int]:
    """Send all streams, and kill `victim` after `KILL_AT` events; failures by their reason."""
    left = iter(range(STREAMS))
    events = 0
    failures = Counter[str]()

    async def ask(http: httpx.AsyncClient, number: int) -> str:
        nonlocal events
        body = {"model": model, "prompt": f"{number} times upon a time", "max_tokens": TOKENS}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        tokens = 0
        done = False
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", 0)
                events += 1
                if events == KILL_AT:
                    await asyncio.to_thread(kill, victim)
        return "" if done and tokens == TOKENS else "broke off"

    async def work() -> None:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
            for number in left:
                try:
                    reason = await ask(http, number)
                except httpx.HTTPError as error:
                    reason = type(error).__name__
                failures.update([reason] if reason else [])

    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    if events < KILL_AT:
        raise SystemExit(f"only {events} events came: nothing was killed")
    return dict(failures)


def peers(arguments: argparse.Namespace) -> None:
    """The failures of each front; those that have a result already are left out."""
    out = arguments.work / "peers.json"
    results = json.loads(out.read_text()) if out.exists() else {}
    ports = free_ports(2)
    model = read_file(Plan, arguments.work / "one.json").recipe.name
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    plan = arguments.work / "round-robin.json"
    fronts = commands(arguments.bin, plan, urls, model)
    with ExitStack() as both:
        both.enter_context(vllm_on(arguments, 0, ports[0]))
        for name, command in fronts.items():
            if name in results or late(arguments):
                continue
            (port,) = free_ports(1)
            words = [word.replace("PORT", str(port)) for word in command]
            with vllm_on(arguments, 1, ports[1]) as victim:
                asyncio.run(wait_healthy(ports))
                with open_front(words, port, model):
                    results[name] = asyncio.run(failed_streams(port, model, victim))
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{name}: {results[name] or 'none'} of {STREAMS} failed", file=sys.stderr)


def commands(folder: Path, plan: Path, urls: Sequence[str], model: str) -> dict[str, list[str]]:
    """The fronts that are there, by name; PORT stands for the port."""
    ours = [*LLMCTL, "serve", str(plan), "--port", "PORT"]
    ours += ["--served-model-name", model, *(word for url in urls for word in ("--replica", url))]
    found = {"llmctl, round-robin": ours, "llmctl, sglang": [*ours, "--router", "sglang"]}
    where = ["--host", "127.0.0.1", "--port", "PORT", "--worker-urls", *urls]
    for name, first in (("sglang-router", ["launch"]), ("vllm-router", [])):
        if (folder / name).is_file():
            metrics = ["--prometheus-port", str(free_ports(1)[0])]
            words = [str(folder / name), *first, *where, "--policy", "cache_aware", *metrics]
            found[f"{name}, cache_aware"] = words
    return found


@contextmanager
def open_front(words: Sequence[str], port: int, model: str) -> Iterator[None]:
    """A front of this command line; it has found its replicas, which serve `model`."""
    body = {"model": model, "prompt": "a", "max_tokens": 1, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port)
            for _ in range(300):
                if httpx.post(url, json=body, timeout=60, trust_env=False).is_success:
                    break
                time.sleep(0.2)
            else:
                raise SystemExit("the front finds no replicas")
            time.sleep(1.0)  # it may have found only one of them
            yield
        finally:
            process.terminate()


def report(results: Mapping[tuple[int, str], Sequence[Replayed]]) -> str:
    """The tables as markdown."""
    by_router = {
        router: [one for (_, name), of in results.items() if name == router for one in of]
        for router in ROUTERS
    }
    by_router = {router: of for router, of in by_router.items() if of}
    return "\n".join([*_windows(results), "", *_means(by_router), "", *_orders(by_router), ""])


def _numbers(seed: int, router: str, replayed: Replayed) -> dict[str, object]:
    """A window's raw data, to four digits."""
    (hits, expected) = replayed.hits
    one = replayed.result
    known = {
        "measured": one.measured | {"hit_percent": hits},
        "predicted": one.predicted | {"hit_percent": expected},
        "both": replayed.both,
        "in_hindsight": one.predicted_in_hindsight or {},
    }
    speed = {
        "requests": one.requests,
        "failed": one.failed,
        "slowdown": one.slowdown,
        "slowdown_meanwhile": one.slowdown_meanwhile or 1.0,
        "front_first_s": one.front_first_s,
    }
    return {
        "seed": seed,
        "router": router,
        **{name: _four_digits(value) for name, value in speed.items()},
        **{
            name: {key: _four_digits(values[key]) for key in KEPT if key in values}
            for name, values in known.items()
        },
    }


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _windows(results: Mapping[tuple[int, str], Sequence[Replayed]]) -> Iterator[str]:
    """Each window: medians of what was measured, and of the errors, over its repeats."""
    yield "| window | router | | hits % | requests/s | TTFT mean s | E2E mean s | goodput/s |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for (seed, router), repeats in results.items():
        for each in repeats:
            one = each.result
            speed = f"{one.slowdown:.2f} before, {one.slowdown_meanwhile or 1.0:.2f} meanwhile"
            print(
                f"{seed} {router}: {one.requests} requests, {one.failed} failed; slowdown {speed};"
                f" front {1e3 * one.front_first_s:.0f} ms",
                file=sys.stderr,
            )
        hits, expected = np.median([each.hits for each in repeats], axis=0)
        points = median(expected - hits for hits, expected in (each.hits for each in repeats))
        values = (median(each.result.measured[name] for each in repeats) for name in SHOWN)
        shown = " | ".join(f"{value:.3g}" for value in values)
        yield f"| {seed} | {router} | measured | {hits:.1f} | {shown} |"
        errors = _errors([(each.result.predicted, each.result.measured) for each in repeats])
        yield f"| | | predicted | {expected:.1f} ({points:+.1f} points) | {errors} |"
        both = _errors([(each.both, each.result.measured) for each in repeats])
        yield f"| | | both | | {both} |"
        known = [(each.result.predicted_in_hindsight, each.result.measured) for each in repeats]
        if all(predicted for predicted, _ in known):
            yield f"| | | in hindsight | | {_errors(known)} |"


def _means(by_router: Mapping[str, Sequence[Replayed]]) -> Iterator[str]:
    """Over the windows of each router: what was measured, and the errors of the predictions."""
    yield "| router | hits % | off | requests/s | off | TTFT mean s | off | goodput/s | off |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for router, of in by_router.items():
        hits = np.mean([each.hits for each in of], axis=0)
        cells = [f"{hits[0]:.1f} | {hits[1] - hits[0]:+.1f}"]
        for name in (*AIMS, "goodput_rps"):
            measured, predicted = _mean(of, name)
            cells.append(f"{measured:.3g} | {100.0 * (predicted / measured - 1.0):+.1f} %")
        yield f"| {router} | {' | '.join(cells)} |"


def _orders(by_router: Mapping[str, Sequence[Replayed]]) -> Iterator[str]:
    """The pairs of routers that differ by more than the aim, and those that are in another order
    than predicted.
    """
    for name, better in (("ttft_mean_s", -1.0), ("goodput_rps", 1.0)):
        means = {router: _mean(of, name) for router, of in by_router.items()}
        differ = 0
        wrong = []
        for first, second in combinations(means, 2):
            (one, one_said) = means[first]
            (other, other_said) = means[second]
            if abs(one / other - 1.0) <= AIMS.get(name, AIMS["throughput_rps"]) / 100.0:
                continue
            differ += 1
            if (one > other) != (one_said > other_said):
                wrong.append(f"{first} and {second}")
        order = sorted(means, key=lambda router: -better * means[router][0])
        yield (
            f"{name}: best first, as measured: {', '.join(order)}. {differ} pairs differ by more"
            f" than the aim; in another order than predicted: {', '.join(wrong) or 'none'}."
        )


def _mean(of: Sequence[Replayed], name: str) -> tuple[float, float]:
    """A metric over windows: measured, predicted."""
    return (
        float(np.mean([each.result.measured[name] for each in of])),
        float(np.mean([each.result.predicted[name] for each in of])),
    )


def _errors(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    """Of predictions, each with what was measured: their medians, and those of their errors."""
    cells = []
    for name in SHOWN:
        value = median(predicted[name] for predicted, _ in pairs)
        error = median(100.0 * (said[name] / measured[name] - 1.0) for said, measured in pairs)
        cells.append(f"{value:.3g} ({error:+.1f} %)")
    return " | ".join(cells)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line, or of `words`."""
    parser = make_parser(__doc__)
    add_live_options(parser, STAGES, warmup_s=10.0)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each window")
    parser.add_argument(
        "--bin", type=Path, default=Path(sys.executable).parent, help="where the other routers are"
    )
    return in_folder(parser.parse_args(words))


def main() -> None:
    arguments = options()
    stages = [arguments.stage] if arguments.stage else STAGES
    if "prepare" in stages and not (arguments.work / f"{TRACE}.jsonl").exists():
        generated = GENERATED[TRACE].split()
        run(arguments, "trace", "generate", "--out", f"{TRACE}.jsonl", *generated)
    profile_and_fit(arguments, stages)
    if "plans" in stages:
        plans(arguments)
    if "measure" in stages:
        measure(arguments)
    if "peers" in stages:
        peers(arguments)
    if "report" in stages:
        results = found(arguments)
        print(report(results))
        keep("windows", [_numbers(*key, one) for key, of in results.items() for one in of])


if __name__ == "__main__":
    main()
