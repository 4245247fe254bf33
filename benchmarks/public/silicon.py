"""Servers that others measured at a fixed concurrency, predicted from the operators that ship.

    python -m benchmarks.public.silicon --data AICONFIGURATOR [--calibrate] [--write]

Takes some minutes. Needs a checkout of ai-dynamo/aiconfigurator (Apache-2.0, NVIDIA):
systems/silicon_sample.csv has TTFT and TPOT of each server.

Each row of vLLM without disaggregation is predicted: the operators of its GPU
(`toolkit/estimators/operators.json`) are summed at the passes that such a server makes, a law is
fitted to the sums, and the simulator serves as many requests at once as the row says, by the
protocol of its source (`benchmarks.public.servers`). A row that is not modelled is counted by
reason.

What no operator tells, the constants of an engine, is set on a tenth of the rows: settings that a
seed draws (`tenth_of`). They are in no table of errors. --calibrate sets them anew, and --write
makes them those that ship. `benchmarks.public.scoreboard` prints the errors beside a peer's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.common.command import make_parser
from benchmarks.public.law_of_operators import OperatorLaw, law_of_passes
from benchmarks.public.operators import GPUS, flat_json
from benchmarks.public.servers import (
    IN_MXFP4,
    MS,
    UNEXPLAINED,
    Protocol,
    Row,
    protocol_of,
    shapes_of,
    split_rows,
    trace_of,
)
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import InputError
from toolkit.estimators.forms import Floats
from toolkit.estimators.gpu_operators import (
    TABLE,
    WEIGHT_BYTES,
    EngineConstants,
    ModelShapes,
    engine_constants,
    family_of,
    measured_operators,
)
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepShape, chunk_attended, chunk_inside
from toolkit.metrics import latencies
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.groups.caches import CacheSettings
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.units import GIB

BLOCK_TOKENS = 16
KNOTS = (0, 4, 16, 64, 128, 256, 512, 1024)  # new tokens, where the cost of one more may change

# ---- laws ----


def passes_of(rows: int, tokens: int, length: int, window: int = 0) -> list[StepShape]:
    """Passes of a server with up to so many rows and new tokens, and requests that grow to
    `length`: of decodes alone, and of chunks beside decodes. `window`: of sliding windows.
    """
    counts = sorted({round(rows ** (k / 12)) for k in range(13)})
    lengths = [length // 16, length // 4, length // 2, length]
    if window:
        lengths = sorted({window // 4, window // 2, *lengths})
    shapes = []
    for count, cached in product(counts, lengths):
        inside = count * min(cached, window - 1) if window else 0
        shapes.append(StepShape(count, count * cached, decode_inside=inside))
    few = sorted({0, 1, max(rows // 16, 1), max(rows // 4, 1), rows})
    for new in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
        for count, cached in product(few, lengths):
            if not count and cached > lengths[0]:
                continue
            if new + count > tokens:
                continue
            for before in (0, length // 2):
                if new + before > length and before:
                    continue
                parts = max(-(-new // length), 1)  # prompts that fit in the pass
                attended = parts * chunk_attended(before, new // parts)
                shape = StepShape(count, count * cached, parts, new, attended, before)
                if window:
                    shape.decode_inside = count * min(cached, window - 1)
                    shape.prefill_inside = parts * chunk_inside(before, new // parts, window)
                shapes.append(shape)
    return shapes


@dataclass(frozen=True)
class Server:
    """An engine as its row and its protocol describe it."""

    row: Row
    protocol: Protocol
    shapes: ModelShapes

    @property
    def layers_of_block(self) -> int:
        """Layers that a block of the KV cache has tokens of: of a model with windows those of one
        kind, since both kinds take blocks of one pool.
        """
        return self.shapes.layers - self.shapes.window_layers

    @property
    def caches(self) -> CacheSettings | None:
        """The groups of KV caches of a model with windows; None: there is one group."""
        shapes = self.shapes
        if not shapes.window:
            return None
        layers = self.layers_of_block
        if layers != shapes.window_layers:
            raise InputError(
                f"{self.row.model}: {shapes.window_layers} layers with windows and {layers} without"
            )
        page = BLOCK_TOKENS * self.token_bytes
        groups = (
            CacheGroup(
                "window", "SlidingWindowSpec", BLOCK_TOKENS, layers, page, window=shapes.window
            ),
            CacheGroup("full", "FullAttentionSpec", BLOCK_TOKENS, layers, page),
        )
        return CacheSettings(groups, self.protocol.longest or self.row.prompt + self.row.output + 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache of one layer."""
        shapes = self.shapes
        return 2 * shapes.kv_heads_of(self.row.ranks) * shapes.head_dim * shapes.cache_bytes

    @property
    def blocks(self) -> int:
        """Blocks of its KV cache: what weights and the reserve leave."""
        sheet = gpu_of(GPUS[self.row.gpu][0])
        ranks = self.row.ranks
        shapes = self.shapes
        budget = sheet.memory_gib * GIB * (self.protocol.share - self.protocol.taken)
        budget -= weight_bytes(shapes) / ranks
        blocks = int(budget / (self.layers_of_block * self.token_bytes * BLOCK_TOKENS))
        if blocks < 1:
            raise InputError(f"{self.row.name}: the weights leave no KV cache")
        return blocks


def weight_bytes(shapes: ModelShapes) -> float:
    """Bytes of a model's weights."""
    heads = 2 * shapes.heads + 2 * shapes.kv_heads
    linear = shapes.hidden * (shapes.head_dim * heads + 3 * shapes.intermediate)
    experts = 3 * shapes.hidden * shapes.expert_intermediate * shapes.experts
    each = linear * WEIGHT_BYTES[shapes.weights]
    each += experts * WEIGHT_BYTES[shapes.expert_weights or shapes.weights]
    return shapes.layers * each + 2 * shapes.vocab * shapes.hidden * WEIGHT_BYTES["bfloat16"]


def server_of(shapes: ModelShapes, row: Row, protocol: Protocol) -> Server:
    """The engine of a row with a model of these shapes."""
    own = replace(
        shapes,
        cache_bytes=protocol.cache_bytes,
        expert_weights=protocol.experts or shapes.expert_weights,
        whole_experts=protocol.whole_experts and row.ranks > 1,
    )
    return Server(row, protocol, own)


def modelled(data: Path, row: Row, protocol: Protocol) -> Server:
    """The engine of a row of the file."""
    return server_of(shapes_of(data, row.model, row.precision), row, protocol)


@cache
def law_of(
    gpu: str,
    shapes: ModelShapes,
    ranks: int,
    sizes: tuple[int, int, int],
    constants: EngineConstants,
) -> OperatorLaw:
    """The law of a server's passes: up to `sizes` rows, new tokens, and tokens of a request."""
    operators = replace(measured_operators(gpu), engine=constants)
    passes = passes_of(*sizes, shapes.window)
    seconds = operators.pass_seconds(shapes, passes, ranks)
    return law_of_passes(passes, seconds, KNOTS, window=shapes.window)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the requests of a run, and whether its cache was full at some time."""

    ttft_s: float
    tpot_s: float
    full: bool


def predict(server: Server, constants: EngineConstants) -> Prediction:
    """Serve the row's requests."""
    row = server.row
    protocol = server.protocol
    most = row.prompt + row.output
    rows = 1 << max(row.concurrency - 1, 1).bit_length()
    sizes = (rows, protocol.tokens, most)
    law = law_of(row.gpu, server.shapes, row.ranks, sizes, constants).law
    if not protocol.ahead:
        law = replace(law, host_s=constants.host_s, host_row_s=constants.host_row_s)
    engine = PagedEngine(
        law,
        server.blocks,
        BLOCK_TOKENS,
        protocol.ahead,
        front_s=constants.front_s,
        front_row_s=constants.front_row_s,
        caches=server.caches,
    )
    flags = VllmPolicy(
        min(protocol.rows, protocol.tokens), protocol.tokens, prefix_caching=server.caches is None
    )
    memory = ZetaMemory(engine.capacity_tokens)
    trace = trace_of(row, protocol)
    world = World(unit_step(), memory, 1, most, paged=engine, concurrency=row.concurrency)
    result = simulate(trace, flags, world)
    found = latencies(result.served)
    full = result.counters["peak_memory_percent"] > 97.0
    return Prediction(float(found["ttft"].mean()), float(found["tpot"].mean()), full)


# ---- constants ----

TTFT_WEIGHT = 0.5  # of a residual: repeats of TTFT differ by several times those of TPOT
# Where the search begins. Constants that rows do not tell stay near it: one that is e times as
# large counts as much as a row that is 10 % off.
START = EngineConstants(
    kernel_s=3.4e-6,
    pass_s=1e-4,
    reduce_s=5e-6,
    sustained=0.9,
    routed=0.9,
    routed_mxfp4=0.9,
    speed_mxfp4=1.0,
    reduce_speed=1.0,
    launch_s=1.5e-4,
    host_s=5e-4,
    host_row_s=4e-5,
    front_s=0.015,
    front_row_s=1e-4,
)


def calibrate(data: Path, rows: Sequence[Row]) -> Constants:
    """The constants of each family. Only H100s ran engines that do not plan ahead, so the others
    have their host. Models in mxfp4 set the constant of their own kernels, and no other.
    """
    names = [each.name for each in fields(EngineConstants) if each.name not in MXFP4]
    others = [row for row in rows if row.model not in IN_MXFP4]
    of = {name: [row for row in others if family_of(row.gpu) == name] for name in FAMILIES}
    found = {"h100": fit_constants(data, of["h100"], START, names)}
    host = {"host_s": found["h100"].host_s, "host_row_s": found["h100"].host_row_s}
    free = [name for name in names if name not in host]
    for name in FAMILIES[1:]:
        found[name] = fit_constants(data, of[name], replace(START, **host), free)
    return calibrate_mxfp4(data, rows, found)


def calibrate_mxfp4(data: Path, rows: Sequence[Row], constants: Constants) -> Constants:
    """`constants` with those of kernels for experts in mxfp4."""
    found = {}
    for name, known in constants.items():
        own = [row for row in rows if row.model in IN_MXFP4 and family_of(row.gpu) == name]
        start = replace(known, **{one: getattr(START, one) for one in MXFP4})
        found[name] = fit_constants(data, own, start, MXFP4)
    return found


MXFP4 = ("routed_mxfp4", "speed_mxfp4")  # constants of kernels for experts in mxfp4


def fit_constants(
    data: Path, rows: Sequence[Row], start: EngineConstants, names: Sequence[str]
) -> EngineConstants:
    """The constants `names`, others as at the `start`, with the least logarithms of predicted over
    measured, TPOT and TTFT, each model on each GPU weighing alike; a residual beyond 10 % counts
    less than its square. TTFT counts where the source says its protocol.
    """
    rows = [row for row in rows if row.model not in UNEXPLAINED]
    servers = [modelled(data, row, protocol_of(row)) for row in rows]
    groups = Counter((row.gpu, row.model) for row in rows)
    weight = np.array([groups[row.gpu, row.model] ** -0.5 for row in rows])
    first = np.array([getattr(start, name) for name in names])

    said = np.array([TTFT_WEIGHT * server.protocol.said for server in servers])
    usual = float(np.median(weight))

    def constants_at(logs: Floats) -> EngineConstants:
        values = [float(f"{value:.4g}") for value in np.exp(logs) * first]
        return replace(start, **dict(zip(names, values, strict=True)))

    def residual(shifted: Floats) -> Floats:
        logs = shifted - 1.0
        constants = constants_at(logs)
        found = [predict(server, constants) for server in servers]
        law_of.cache_clear()
        tpot = np.log([one.tpot_s / row.tpot_s for one, row in zip(found, rows, strict=True)])
        ttft = np.log([one.ttft_s / row.ttft_s for one, row in zip(found, rows, strict=True)])
        return np.concatenate([weight * tpot, weight * said * ttft, ROW_OFF * usual * logs])

    found = least_squares(
        residual,
        np.ones(len(names)),  # of 0 no step is a share
        loss="soft_l1",
        f_scale=ROW_OFF * usual,
        diff_step=0.05,
        max_nfev=MOST_STEPS,
    )
    return constants_at(found.x - 1.0)


ROW_OFF = 0.1
MOST_STEPS = 15
FAMILIES = ("h100", "h200", "blackwell")
Constants = dict[str, EngineConstants]  # by family


def shipped_constants() -> Constants:
    """The constants that ship."""
    return {name: engine_constants(name) for name in FAMILIES}


# ---- comparison ----


@dataclass(frozen=True, slots=True)
class Compared:
    """A row with its predictions; `peer`: seconds of TTFT and TPOT, or why there are none."""

    row: Row
    ours: Prediction
    peer: tuple[float, float] | str

    def errors(self) -> tuple[float, float]:
        """Of TPOT and TTFT, signed, in percent."""
        row = self.row
        return percent(self.ours.tpot_s, row.tpot_s), percent(self.ours.ttft_s, row.ttft_s)

    def peer_errors(self) -> tuple[float, float] | None:
        """The same of the peer; None: it has no answer."""
        if isinstance(self.peer, str):
            return None
        ttft_s, tpot_s = self.peer
        return percent(tpot_s, self.row.tpot_s), percent(ttft_s, self.row.ttft_s)


def percent(predicted: float, measured: float) -> float:
    """The error of a prediction, in percent."""
    return 100.0 * (predicted / measured - 1.0)


def compare(
    data: Path, rows: Sequence[Row], constants: Constants, peer: Mapping[str, Any]
) -> list[Compared]:
    """Predict the rows."""
    found = []
    for row in rows:
        server = modelled(data, row, protocol_of(row))
        ours = predict(server, constants[family_of(row.gpu)])
        found.append(Compared(row, ours, answer_of(peer, row)))
    return found


def answer_of(peer: Mapping[str, Any], row: Row) -> tuple[float, float] | str:
    """What a peer says of a row: seconds of TTFT and TPOT, or why not."""
    given = peer.get(row.name, "not asked")
    return given if isinstance(given, str) else (MS * given[0], MS * given[1])


def median_error(group: Sequence[Compared], kind: int) -> float:
    """The median size of the errors of TPOT (0) or TTFT (1)."""
    return round(float(np.median([abs(one.errors()[kind]) for one in group])), 1)


@dataclass(frozen=True)
class Board:
    """All that was found: rows read, those that are not modelled by reason, those that the
    constants were set on, and the judged ones with their predictions.
    """

    rows: list[Row]
    reasons: Counter[str]
    tenth: list[Row]
    judged: list[Compared]
    peer_version: str


def read_peer(path: Path | None) -> dict[str, Any]:
    """What the peer said; None: it was not asked."""
    if path is None:
        return {}
    if not path.exists():
        raise SystemExit(f"{path}: it is missing; benchmarks.public.silicon_peer writes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def board_of(data: Path, constants: Constants, peer: Mapping[str, Any]) -> Board:
    """Read and predict all rows."""
    split = split_rows(data)
    judged = compare(data, split.judged, constants, peer.get("rows", {}))
    return Board(split.rows, split.reasons, split.tenth, judged, peer.get("version", ""))


def write_constants(constants: Constants, board: Board) -> None:
    """Replace the constants that ship."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    content["engine"] = {
        "constants": {name: asdict(one) for name, one in constants.items()},
        "source": f"{len(board.tenth)} rows of systems/silicon_sample.csv, vLLM 0.10 to 0.19",
    }
    TABLE.write_text(flat_json(content), encoding="utf-8")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="aiconfigurator")
    parser.add_argument("--calibrate", action="store_true", help="set the constants anew")
    parser.add_argument("--write", action="store_true", help="replace the constants that ship")
    options = parser.parse_args()
    constants = shipped_constants()
    if options.calibrate:
        constants = calibrate(options.data, split_rows(options.data).tenth)
        print(json.dumps({name: asdict(one) for name, one in constants.items()}))
    board = board_of(options.data, constants, {})
    tpot, ttft = (median_error(board.judged, kind) for kind in (0, 1))
    print(f"{len(board.judged)} judged: medians of errors {tpot} % (TPOT), {ttft} % (TTFT)")
    if options.write:
        write_constants(constants, board)


if __name__ == "__main__":
    main()
