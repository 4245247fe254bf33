"""Slices on a transformers model: one padded batch at a time, a prefill and then one decode
iteration per token.

Rows are padded on the left, so that all end in the same column and attention needs one mask. The
prefill gives the first token of a slice. The cache is dropped when a slice ends: the next slice
prefills again (SCLS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache

from toolkit.engines.devices import choose_attention_kernels
from toolkit.engines.loading import config_digest, eos_token_ids, load_model
from toolkit.engines.memory import ByteLedger, ModelShape, kv_budget_bytes, on_device
from toolkit.engines.protocol import OnStep, Row, SliceOutput, SliceRecord
from toolkit.engines.row_cache import ROW_ATTENTION, use_packed_attention
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import PaddedBatch, values_per_token
from toolkit.engines.tensor_parallel import RankShare
from toolkit.errors import InputError
from toolkit.files.io import processor
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

# The shortest row of a timed batch is shorter by 1/4 of the longest: about what sorting by length
# leaves.
SPREAD_DIVISOR = 4
TIMED_STEPS = 2  # decode steps that are timed together


class TransformersEngine:
    """`toolkit.engines.protocol.Engine` on any causal language model of transformers with full
    attention.

    Raises `EngineError` if the model or the device cannot be used, and `InputError` if the recipe
    lacks a setting.
    """

    name = "transformers"

    def __init__(
        self,
        spec: ModelSpec,
        engine: EngineSpec,
        hardware: HardwareSpec,
        share: RankShare | None = None,
    ) -> None:
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        self._model = load_model(spec, hardware, share)
        shares = share.size if share else 1
        self._version: str = transformers.__version__
        self._deepspeed = ""  # what DeepSpeed made of the model
        self._network = self._prepare(spec, engine, hardware)
        self._device = self._model.device
        if share:
            share.join(self._device)
        self._dtype = self._model.dtype
        self._like = torch.empty(0, dtype=self._dtype, device=self._device)
        config = self._model.config.get_text_config(decoder=True)
        self._layers: int = config.num_hidden_layers
        self._shape = ModelShape.of(config, self._dtype, shares)
        self._eos_ids = eos_token_ids(self._model)
        self._last_position = spec.max_model_len - 1
        # The type of masks that attention adds to its scores; None: the model makes its own.
        sdpa = self._model.config._attn_implementation in ("sdpa", ROW_ATTENTION)
        self._masks_as = self._dtype if sdpa else None
        # What each layer caches is measured: configs name the sizes in too many ways for a formula.
        probe = self._padded([[0]], 1)
        with torch.inference_mode():
            self._prefill(probe)
        self._kv_shapes = probe.cache.kv_shapes()
        self._kv_bytes_per_token = self._shape.value_bytes * values_per_token(self._kv_shapes)
        measured = shares * self._kv_bytes_per_token
        if spec.kv_bytes_per_token not in (None, measured):
            raise InputError(
                f"model.kv_bytes_per_token is {spec.kv_bytes_per_token}; the loaded model caches "
                f"{measured} bytes per token",
                f"set it to {measured}, or leave it out",
            )
        budget = kv_budget_bytes(engine, self._device)
        if share:
            budget = share.least(budget, self._device)
        self.ledger = ByteLedger(budget, alone=share is None)
        self.facts = self._facts(spec, budget, share)

    def _facts(self, spec: ModelSpec, budget: int, share: RankShare | None) -> EngineFacts:
        on_cpu = self._device.type == "cpu"
        parameters = sum(weight.numel() for weight in self._model.parameters())
        return EngineFacts(
            engine=self.name,
            engine_version=self._version,
            model_type=self._model.config.get_text_config(decoder=True).model_type,
            parameters=share.parameters if share else parameters,
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
            tensor_parallel_size=share.size if share else 1,
            deepspeed=self._deepspeed,
        )

    def _prepare(
        self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
    ) -> Callable[..., Any]:
        """The callable of forward passes: the loaded model, or what a subclass makes of it."""
        if self._model.device.type == "cuda":
            choose_attention_kernels()
            use_packed_attention(self._model)
        model: Callable[..., Any] = self._model
        return model

    @on_device
    def run_slice(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        self._check_rows(rows)
        width = max(len(row.tokens) for row in rows)
        steps = min(steps, max(row.remaining for row in rows))
        record = SliceRecord(rows, self._eos_ids)
        with self.ledger.reserve(self.slice_bytes(len(rows), width, steps)):
            batch = self._padded([row.tokens for row in rows], width + steps)
            sampler = Sampler(rows, self._eos_ids, self._shape.vocab, self._device)
            logits = self._prefill(batch)
            for step in range(steps):
                drawn = sampler.draw(logits, step)
                wanted = on_step(record.advance(drawn.tolist()))
                if not wanted or record.all_ended or step == steps - 1:
                    break
                logits = self._decode(batch, drawn)
        return record.output()

    @on_device
    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`: from the rows' tokens to each first token on the host."""
        rows = self._timed_rows(batch_size, input_length)
        with self.ledger.reserve(self.slice_bytes(batch_size, input_length, 1)):
            self._synchronize()
            start = clock()
            batch = self._padded(rows, input_length + 1)
            self._prefill(batch).argmax(dim=-1).tolist()
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
        held = batch_size * (cached_length + 1) * self._kv_bytes_per_token
        held += self._shape.prefill_bytes(batch_size, 1)
        with self.ledger.reserve(held):
            batch = self._padded(rows, filled + 1 + steps)
            batch.cache.fill(self._kv_shapes, batch_size, filled, self._like)
            tokens = batch.input_ids[:, -1].clone()
            # An untimed step comes first, as in serving: filling the cache has evicted the weights
            # from the processor's caches.
            tokens = self._decode(batch, tokens).argmax(dim=-1)
            self._synchronize()
            start = clock()
            for _ in range(steps):
                tokens = self._decode(batch, tokens).argmax(dim=-1)
                tokens.tolist()
            return (clock() - start) / steps

    def slice_bytes(self, batch_size: int, input_length: int, steps: int) -> int:
        """Peak bytes of N rows padded to L and run for S steps: the slab and the prefill."""
        slab = batch_size * (input_length + steps) * self._kv_bytes_per_token
        return slab + self._shape.prefill_bytes(batch_size, input_length)

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

    def _prefill(self, batch: PaddedBatch) -> torch.Tensor:
        """Logits [N, V] of the first new token."""
        return self._prefill_columns(batch, 0, batch.width)

    def _prefill_columns(self, batch: PaddedBatch, start: int, end: int) -> torch.Tensor:
        """Cache the columns from `start` to `end`; logits [N, V] of the token after `end`."""
        columns = slice(start, end)
        ids, positions = batch.input_ids[:, columns], batch.positions[:, columns]
        return self._forward(ids, batch.mask[:, :end], positions, batch.cache)

    def _decode(self, batch: PaddedBatch, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] after one more token per row, [N]."""
        column = batch.cache.get_seq_length()
        mask = batch.mask_up_to(column + 1, self._masks_as)
        return self._forward(
            tokens[:, None], mask, batch.positions[:, column : column + 1], batch.cache
        )

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
        step, generator = max(batch_size - 1, 1), torch.Generator().manual_seed(length)
        tokens: list[list[int]] = torch.randint(
            self._shape.vocab, (batch_size, length), generator=generator
        ).tolist()
        return [
            row[: length - index * (length - shortest) // step] for index, row in enumerate(tokens)
        ]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
