"""Slices on a transformers model: one padded batch at a time, a prefill and then one decode
iteration per token.

Rows are padded on the left, so that all end in the same column and attention needs one mask. The
prefill gives the first token of a slice. The cache is dropped when a slice ends: the next slice
prefills again (SCLS).

Where decode steps have fixed shapes (`toolkit.engines.fixed_step`), by default on a GPU, caches lie
in an arena that is allocated once. The budget is then in two parts: a slice fits if its N * (L + S)
tokens fit into the arena, and its prefill runs in as many passes as fit into the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache

from toolkit.engines.attention import (
    OUR_ATTENTION,
    FlashRows,
    TokenRows,
    choose_rows,
    use_our_attention,
)
from toolkit.engines.devices import choose_attention_kernels
from toolkit.engines.fixed_step import FixedSteps
from toolkit.engines.loading import config_digest, eos_token_ids, load_model
from toolkit.engines.memory import (
    ByteLedger,
    ModelShape,
    PastBudget,
    kv_budget_bytes,
    on_device,
)
from toolkit.engines.norms import fuse_norms
from toolkit.engines.protocol import (
    EnginePass,
    OnStep,
    OutOfMemory,
    Part,
    PassOutput,
    PassRecord,
    Row,
    rows_of_slice,
)
from toolkit.engines.rebatch_cache import RebatchCache
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import Arena, PaddedBatch, values_per_token
from toolkit.errors import InputError
from toolkit.files.io import processor
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

# The shortest row of a timed batch is shorter by 1/4 of the longest: about what sorting by length
# leaves.
SPREAD_DIVISOR = 4
TIMED_STEPS = 2  # decode steps that are timed together
# The part of the budget beside an arena, for the activations of prefills: one part in so many, but
# enough for the longest row, and at most half.
WORKSPACE_PART = 8


class TransformersEngine:
    """`toolkit.engines.protocol.Engine` on any causal language model of transformers with full
    attention.

    Raises `EngineError` if the model or the device cannot be used, and `InputError` if the recipe
    lacks a setting.
    """

    name = "transformers"
    has_arena = True  # if decode steps have fixed shapes

    def __init__(self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        self._model = load_model(spec, hardware)
        self._version: str = transformers.__version__
        self._deepspeed = ""  # what DeepSpeed made of the model
        self._network = self._prepare(spec, engine, hardware)
        self._device = self._model.device
        self._dtype = self._model.dtype
        self._like = torch.empty(0, dtype=self._dtype, device=self._device)
        config = self._model.config.get_text_config(decoder=True)
        self._layers: int = config.num_hidden_layers
        self._shape = ModelShape.of(config, self._dtype)
        self._eos_ids = eos_token_ids(self._model)
        self._last_position = spec.max_model_len - 1
        # The type of masks that attention adds to its scores; None: the model makes its own.
        sdpa = self._model.config._attn_implementation in ("sdpa", OUR_ATTENTION)
        self._masks_as = self._dtype if sdpa else None
        # What each layer caches is measured: configs name the sizes in too many ways for a formula.
        probe = self._padded([[0]], 1)
        with torch.inference_mode():
            self._prefill_columns(probe, 0, 1)
        self._kv_shapes = probe.cache.kv_shapes()
        self._kv_bytes_per_token = self._shape.value_bytes * values_per_token(self._kv_shapes)
        measured = self._kv_bytes_per_token
        if spec.kv_bytes_per_token not in (None, measured):
            raise InputError(
                f"model.kv_bytes_per_token is {spec.kv_bytes_per_token}; the loaded model caches "
                f"{measured} bytes per token",
                f"set it to {measured}, or leave it out",
            )
        budget = kv_budget_bytes(engine, self._device)
        self.ledger = ByteLedger(budget)
        self.facts = self._facts(spec, budget)
        self._arena: Arena | None = None
        self._fixed: FixedSteps | None = None
        if self.has_arena and self._wants_fixed_shapes(engine):
            self._arena = self._make_arena(budget)
            self._fixed = self._fixed_steps(self._arena)

    def _facts(self, spec: ModelSpec, budget: int) -> EngineFacts:
        on_cpu = self._device.type == "cpu"
        parameters = sum(weight.numel() for weight in self._model.parameters())
        return EngineFacts(
            engine=self.name,
            engine_version=self._version,
            model_type=self._model.config.get_text_config(decoder=True).model_type,
            parameters=parameters,
            dtype=spec.dtype,
            device="cpu" if on_cpu else torch.cuda.get_device_name(self._device),
            threads=torch.get_num_threads() if on_cpu else None,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_budget_bytes=budget,
            capacity_tokens=budget // self._kv_bytes_per_token,
            max_model_len=spec.max_model_len,
            vocab_size=self._shape.vocab,
            prefill_emits_token=True,
            torch=str(torch.__version__),
            processor=processor() if on_cpu else "",
            config_sha256=config_digest(self._model.config),
            deepspeed=self._deepspeed,
        )

    def _prepare(
        self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
    ) -> Callable[..., Any]:
        """The callable of forward passes: the loaded model, or what a subclass makes of it."""
        if self._model.device.type == "cuda":
            choose_attention_kernels()
            use_our_attention(self._model)
        model: Callable[..., Any] = self._model
        return model

    def run(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        """See `Engine.run`; this engine keeps no caches."""
        if plan.keep_cache:
            raise ValueError(f"engine '{self.name}' keeps no caches between passes")
        return self._run_slice(plan, on_step)

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        raise ValueError(f"engine '{self.name}' keeps no caches between passes")

    def _run_slice(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        self._check_rows(plan.enter)
        record = PassRecord(plan, on_step)
        try:
            self._serve(plan, record)
        except OutOfMemory:
            record.run_out()
        return record.output()

    @on_device
    def _serve(self, plan: EnginePass, record: PassRecord) -> None:
        rows = plan.enter
        steps = min(plan.steps, max(row.remaining for row in rows))
        with self._room_for([row.tokens for row in rows], steps) as parts:
            sampler = Sampler(rows, self._eos_ids, self._shape.vocab, self._device)
            logits = self._prefill(parts)
            live = rows_of_slice(plan, self._eos_ids)
            while True:
                drawn = sampler.draw(logits, record.steps)
                live = record.draw(live, drawn.tolist())
                if record.is_over():
                    break
                logits = self._decode(parts, drawn)

    @on_device
    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`: from the rows' tokens to each first token on the host."""
        rows = self._timed_rows(batch_size, input_length)
        self._synchronize()
        start = clock()
        with self._room_for(rows, 1) as parts:
            self._prefill(parts).argmax(dim=-1).tolist()
            return clock() - start

    @on_device
    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_decode`: the steps that serve, on random keys and values, the mean of a
        few; the last one has `cached_length` cached tokens.
        """
        # Each step is one column longer than the last, as in serving: kernels that are planned for
        # a length are planned anew in every step.
        steps = min(TIMED_STEPS, max(cached_length - 1, 1))
        filled = max(cached_length - steps, 1)
        rows = self._timed_rows(batch_size, filled)
        activations = self._shape.prefill_bytes(batch_size, 1)
        with self.ledger.reserve(activations), self._room_for(rows, 1 + steps) as parts:
            for part in parts:
                part.cache.fill(self._kv_shapes, len(part.input_ids), filled, self._like)
            tokens = torch.cat([part.input_ids[:, -1] for part in parts])
            # An untimed step comes first, as in serving: filling the cache has evicted the weights
            # from the processor's caches.
            tokens = self._decode(parts, tokens).argmax(dim=-1)
            if self._fixed is not None:
                self._fixed.warm_up(tokens, steps)
            self._synchronize()
            start = clock()
            for _ in range(steps):
                tokens = self._decode(parts, tokens).argmax(dim=-1)
                tokens.tolist()
            return (clock() - start) / steps

    def _check_rows(self, rows: Sequence[Row]) -> None:
        """Raise `ValueError` for a row that the caller should have refused: beyond the last
        position, the model would repeat that position silently.
        """
        longest = self.facts.max_model_len
        for row in rows:
            if not row.tokens or len(row.tokens) + row.remaining > longest:
                raise ValueError(
                    f"row {row.request_id}: {len(row.tokens)} tokens and {row.remaining} more; "
                    f"a row has at least one, and at most {longest} in all"
                )

    def _padded(self, rows: Sequence[Sequence[int]], columns: int) -> PaddedBatch:
        return PaddedBatch(rows, columns, self._last_position, self._layers, self._device)

    @contextmanager
    def _room_for(
        self, rows: Sequence[Sequence[int]], steps: int
    ) -> Iterator[Sequence[PaddedBatch]]:
        """In this context there is memory for the caches of rows with these tokens, for `steps`
        tokens more: one padded batch, or in an arena as many as its prefills need.
        """
        width = max(len(row) for row in rows)
        columns = width + steps
        if self._arena is not None:
            yield self._in_arena(self._arena, rows, width, columns)
            return
        with self.ledger.reserve(len(rows) * columns * self._kv_bytes_per_token):
            yield [self._padded(rows, columns)]

    def _in_arena(
        self, arena: Arena, rows: Sequence[Sequence[int]], width: int, columns: int
    ) -> list[PaddedBatch]:
        needed = len(rows) * columns
        if needed > arena.tokens:
            raise PastBudget(
                f"{len(rows)} rows of {columns} columns, {needed} tokens of KV cache, do not fit "
                f"into {arena.tokens}"
            )
        lengths = [len(row) for row in rows]
        ends = range(width, needed, columns)
        arena.hold([end - length for end, length in zip(ends, lengths, strict=True)], lengths)
        fitting = self.ledger.free_bytes // self._shape.prefill_bytes(1, width)
        passes = -(-len(rows) // int(max(min(fitting, len(rows)), 1)))
        size = -(-len(rows) // passes)
        parts = []
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            slabs = arena.slabs(first * columns, len(part), columns)
            parts.append(
                PaddedBatch(
                    part, columns, self._last_position, self._layers, self._device, width, slabs
                )
            )
        return parts

    def _prefill(self, parts: Sequence[PaddedBatch]) -> torch.Tensor:
        """Logits [N, V] of the first new token."""
        logits = []
        for part in parts:
            with self.ledger.reserve(self._shape.prefill_bytes(len(part.input_ids), part.width)):
                logits.append(self._prefill_columns(part, 0, part.width))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _prefill_columns(self, batch: PaddedBatch, start: int, end: int) -> torch.Tensor:
        """Cache the columns from `start` to `end`; logits [N, V] of the token after `end`."""
        columns = slice(start, end)
        ids = batch.input_ids[:, columns]
        positions = batch.positions[:, columns]
        return self._forward(ids, batch.mask[:, :end], positions, batch.cache)

    def _decode(self, parts: Sequence[PaddedBatch], tokens: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] after one more token per row, [N]."""
        if self._arena is not None and self._fixed is not None:
            logits = self._fixed.logits(tokens)
            self._arena.advance()
            return logits
        (batch,) = parts
        column = batch.cache.get_seq_length()
        mask = batch.mask_up_to(column + 1, self._masks_as)
        return self._forward(
            tokens[:, None], mask, batch.positions[:, column : column + 1], batch.cache
        )

    def _wants_fixed_shapes(self, engine: EngineSpec, why_not: str = "") -> bool:
        """Whether decode steps are to have fixed shapes: by default on a GPU with FlashAttention,
        without which a step copies the tokens that it reads.

        `why_not` says why they cannot. Raises `InputError` if the recipe wants them all the same.
        """
        wanted = engine.cuda_graphs
        if wanted is None:
            wanted = self._like.is_cuda and not why_not and self._choose_rows() is FlashRows
        if wanted and not why_not and not use_our_attention(self._model):
            why_not = f"the model attends by '{self._model.config._attn_implementation}'"
        if engine.cuda_graphs and why_not:
            raise InputError(
                f"engine.cuda_graphs is true, but {why_not}", "leave engine.cuda_graphs out"
            )
        return bool(wanted and not why_not)

    def _choose_rows(self) -> type[TokenRows]:
        return choose_rows(self._like, self._shape.heads, self._kv_shapes)

    def _fixed_steps(self, cache: Arena | RebatchCache) -> FixedSteps:
        fuse_norms(self._model)
        return FixedSteps(
            self._forward,
            cache,
            self._dtype,
            self._last_position,
            self._choose_rows(),
            capture=self._like.is_cuda,
        )

    def _make_arena(self, budget_bytes: int) -> Arena:
        """The arena, which holds its part of the budget from now on."""
        longest_row = self._shape.prefill_bytes(1, self.facts.max_model_len)
        workspace = min(max(longest_row, budget_bytes // WORKSPACE_PART), budget_bytes // 2)
        tokens = (budget_bytes - workspace) // self._kv_bytes_per_token
        self.ledger.take(tokens * self._kv_bytes_per_token)
        return Arena(self._kv_shapes, self._like, tokens - 1)

    def _forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:
        """Add the columns [N, L] to the cache; logits [N, V] of the last one."""
        logits: torch.Tensor = self._network(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _timed_rows(self, batch_size: int, length: int) -> list[list[int]]:
        """Random tokens, with padding: lengths decrease from `length` to 3/4 of it."""
        shortest = length - length // SPREAD_DIVISOR
        step = max(batch_size - 1, 1)
        generator = torch.Generator().manual_seed(length)
        tokens: list[list[int]] = torch.randint(
            self._shape.vocab, (batch_size, length), generator=generator
        ).tolist()
        return [
            row[: length - index * (length - shortest) // step] for index, row in enumerate(tokens)
        ]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
