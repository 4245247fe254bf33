"""The results of `benchmarks.gpu.run` on one device as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.results_file import markdown


def tables(folder: Path) -> str:
    """The tables of all models in a device's folder; '' where nothing is done yet."""
    parts = [part for model in sorted(folder.glob("*/")) for part in _model(model)]
    return "\n".join(parts)


def _model(folder: Path) -> Iterator[str]:
    found = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }
    engines = [name for name in ("transformers", "rebatch") if f"profile-{name}" in found]
    if engines:
        yield _title(folder.name, found[f"profile-{engines[0]}"])
        yield _laws(found, engines)
    if "swap" in found:
        on_cpu = found["swap"]["environment"]["device"] == "cpu"
        yield "A CPU's swaps copy nothing.\n" if on_cpu else _swaps(found["swap"]["points"])
    for name in ("slices", "rounds"):
        if name in found:
            yield _outcomes(found[name])


def _title(model: str, profile: dict[str, Any]) -> str:
    environment = profile["environment"]
    engine = profile["engine"]
    packages = ", ".join(
        f"{name} {environment['packages'].get(name, '?')}" for name in ("torch", "transformers")
    )
    capacity = f"{engine['capacity_tokens']:,} tokens of KV cache"
    return f"### {model} on {environment['device']}\n\n{engine['dtype']}, {capacity}, {packages}.\n"


def _laws(found: dict[str, Any], engines: list[str]) -> str:
    rows = []
    for engine in engines:
        profile = found[f"profile-{engine}"]
        fit = found.get(f"fit-{engine}")
        for kind, length in (("prefill", "input_length"), ("decode", "cached_length")):
            ends = sorted(profile[kind], key=lambda point: point["batch_size"] * point[length])
            shown = [
                f"{_ms(point)} (N {point['batch_size']}, L {point[length]})"
                for point in (ends[0], ends[-1])
            ]
            error = fit[kind]["error"] if fit else None
            errors = (
                f"{error['median_percent']:.1f} / {error['p95_percent']:.1f} %" if error else "-"
            )
            rows.append([engine, kind, *shown, errors])
    return markdown(
        ["engine", "law", "smallest, ms", "largest, ms", "held out: median / p95"], rows
    )


def _ms(point: dict[str, Any]) -> str:
    return f"{1e3 * median(point['seconds']):.2f}"


def _swaps(points: list[dict[str, Any]]) -> str:
    rows = []
    for point in points:
        rates = [point["size_bytes"] / median(point[way][1:]) / 1e9 for way in ("out_s", "in_s")]
        size = f"{point['size_bytes'] / 2**20:,.1f}"
        rows.append(
            [f"{point['rows']} x {point['length']}", size, *(f"{rate:.2f}" for rate in rates)]
        )
    return markdown(["rows x tokens swapped", "MiB", "out, GB/s", "in, GB/s"], rows)


def _outcomes(file: dict[str, Any]) -> str:
    rows = [
        [
            _contender(one),
            f"{one['served']} / {one['requests']}",
            _both(one, "throughput_rps"),
            _both(one, "ttft_mean_s"),
            _both(one, "e2e_mean_s"),
            f"{one['evictions']}",
            f"{one['oom_events']}",
            f"{one['deciding_percent']:.2f} / {one['hop_percent']:.2f}",
            f"{1e3 * one['step_mean_s']:.2f}",
        ]
        for one in file["outcomes"]
    ]
    columns = [
        "policy",
        f"served in {file['limit_s']:.0f} s",
        "requests/s (predicted)",
        "TTFT s (predicted)",
        "E2E s (predicted)",
        "evictions",
    ]
    columns += ["OOM", "deciding / hop, % of engine", "step ms"]
    return f"{file['trace'][0]}.\n\n" + markdown(columns, rows)


def _contender(one: dict[str, Any]) -> str:
    """The policy's name, and the rows of its batches where it fixes them."""
    rows = one.get("policy", {}).get("parameters", {}).get("batch_size")
    return f"{one['title']}, {rows} rows" if rows else str(one["title"])


def _both(one: dict[str, Any], metric: str) -> str:
    """A metric as measured, and as predicted."""
    nothing = float("nan")
    found = one["measured"].get(metric, nothing), one["predicted"].get(metric, nothing)
    return "{:.2f} ({:.2f})".format(*found)
