"""Slices on a transformers model: one padded batch at a time, prefill and then one decode iteration
per token.

Rows are padded on the left, so that all end in the same column and attention needs one mask. The
prefill gives the first token of a slice. The cache is dropped when a slice ends: the next one
computes its prefill anew (SCLS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers.cache_utils import Cache

from toolkit.engines.loading import config_digest, eos_token_ids, load_model
from toolkit.engines.memory import ByteLedger, ModelShape, at_the_seam, kv_budget_bytes
from toolkit.engines.protocol import OnStep, Row, SliceOutput, SliceRecord, remaining
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import KVShape, PaddedBatch, SlabCache
from toolkit.engines.tensor_parallel import RankShare
from toolkit.errors import InputError
from toolkit.files.io import processor
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

# the shortest row of a timed batch lacks 1/4 of the longest: about what sorting by length leaves
SHORTEST_SHARE = 4


class TransformersEngine:
    """`toolkit.engines.protocol.Engine` on any causal language model of transformers with full
    attention.

    Raises `EngineError` where the model or the device cannot be used, `InputError` where the recipe lacks something.
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
        self._made = ""  # of the model, by what wraps it
        self._network = self._prepare(spec, engine, hardware)
        self._device = self._model.device
        if share:
            share.join(self._device)
        self._dtype = self._model.dtype
        config = self._model.config.get_text_config(decoder=True)
        self._layers: int = config.num_hidden_layers
        self._shape = ModelShape.of(config, self._dtype, shares)
        self._eos_ids = eos_token_ids(self._model)
        self._last_position = spec.max_model_len - 1
        self._bool_masks = self._model.config._attn_implementation == "sdpa"
        self._kv_shapes = self._probe_kv_shapes()
        kv_values = sum(
            keys[1] * keys[3] + values[1] * values[3] for keys, values in self._kv_shapes
        )
        self._kv_bytes_per_token: int = kv_values * self._shape.value_bytes
        _check_kv_bytes(spec, shares * self._kv_bytes_per_token)
        budget = kv_budget_bytes(engine, self._device)
        if share:
            budget = share.least(budget, self._device)
        limited = (
            self._device.type == "cpu"
            or engine.kv_cache_memory_mib is not None
            or share is not None
        )
        self.ledger = ByteLedger(budget if limited else None, alone=share is None)
        self.facts = EngineFacts(
            engine=self.name,
            engine_version=self._version,
            model_type=config.model_type,
            parameters=share.parameters
            if share
            else sum(weight.numel() for weight in self._model.parameters()),
            dtype=spec.dtype,
            device="cpu"
            if self._device.type == "cpu"
            else torch.cuda.get_device_name(self._device),
            threads=torch.get_num_threads() if self._device.type == "cpu" else None,
            kv_bytes_per_token=self._kv_bytes_per_token,
            kv_budget_bytes=budget,
            capacity_tokens=budget // self._kv_bytes_per_token,
            max_model_len=spec.max_model_len,
            vocab_size=self._shape.vocab,
            prefill_emits_token=True,
            torch=str(torch.__version__),
            processor=processor() if self._device.type == "cpu" else "",
            config_sha256=config_digest(self._model.config),
            tensor_parallel_size=shares,
            deepspeed=self._made,
        )

    def _prepare(
        self, spec: ModelSpec, engine: EngineSpec, hardware: HardwareSpec
    ) -> Callable[..., Any]:
        """What forward passes go through: the loaded model, or what a subclass makes of it."""
        model: Callable[..., Any] = self._model
        return model

    def run_slice(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        """See `Engine.run_slice`."""
        return at_the_seam(lambda: self._serve(rows, steps, on_step))

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`. From the rows' tokens to the first token of each, on the host."""
        return at_the_seam(lambda: self._time_prefill(batch_size, input_length, clock))

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_decode`. The cache holds random keys and values; the step is the one
        that serves.
        """
        return at_the_seam(lambda: self._time_decode(batch_size, cached_length, clock))

    @torch.inference_mode()
    def _serve(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        self._check_rows(rows)
        width = max(len(row.tokens) for row in rows)
        steps = min(steps, max(remaining(row) for row in rows))
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

    @torch.inference_mode()
    def _time_prefill(
        self, batch_size: int, input_length: int, clock: Callable[[], float]
    ) -> float:
        rows = self._timed_rows(batch_size, input_length)
        with self.ledger.reserve(self.slice_bytes(batch_size, input_length, 1)):
            self._synchronize()
            start = clock()
            batch = self._padded(rows, input_length + 1)
            self._prefill(batch).argmax(dim=-1).tolist()
            return clock() - start

    @torch.inference_mode()
    def _time_decode(
        self, batch_size: int, cached_length: int, clock: Callable[[], float]
    ) -> float:
        rows = self._timed_rows(batch_size, cached_length)
        held = batch_size * (
            cached_length + 1
        ) * self._kv_bytes_per_token + self._shape.prefill_bytes(batch_size, 1)
        with self.ledger.reserve(held):
            batch = self._padded(rows, cached_length + 1)
            like = torch.empty(0, dtype=self._dtype, device=self._device)
            batch.cache.fill(self._kv_shapes, batch_size, cached_length, like)
            tokens = batch.input_ids[:, -1].clone()
            self._decode(
                batch, tokens
            )  # a step after a step, as it serves: filling the cache has evicted the weights
            batch.cache.crop(-1)
            self._synchronize()
            start = clock()
            self._decode(batch, tokens).argmax(dim=-1).tolist()
            return clock() - start

    def slice_bytes(self, batch_size: int, input_length: int, steps: int) -> int:
        """Bytes of N rows padded to L and run for S steps, at their largest: the slab, and the
        prefill beside it.
        """
        slab = batch_size * (input_length + steps) * self._kv_bytes_per_token
        return slab + self._shape.prefill_bytes(batch_size, input_length)

    def _check_rows(self, rows: Sequence[Row]) -> None:
        """Whoever sends rows has checked them: past the last position, the model would repeat it
        and say nothing.
        """
        longest = self.facts.max_model_len
        for row in rows:
            if not row.tokens or len(row.tokens) + remaining(row) > longest:
                raise ValueError(
                    f"row {row.request_id}: {len(row.tokens)} tokens and {remaining(row)} more; "
                    f"a row has at least one, and at most {longest} in all"
                )

    def _padded(self, rows: Sequence[Sequence[int]], columns: int) -> PaddedBatch:
        return PaddedBatch(
            rows, columns, self._last_position, SlabCache(self._layers, columns), self._device
        )

    def _prefill(self, batch: PaddedBatch) -> torch.Tensor:
        """Logits [N, V] of the first new token."""
        return self._prefill_columns(batch, 0, batch.width)

    def _prefill_columns(self, batch: PaddedBatch, start: int, end: int) -> torch.Tensor:
        """Logits [N, V] of the token after column `end`, once the columns from `start` on are
        cached.
        """
        columns = slice(start, end)
        return self._forward(
            batch.input_ids[:, columns],
            batch.mask[:, :end],
            batch.positions[:, columns],
            batch.cache,
        )

    def _decode(self, batch: PaddedBatch, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] after one more token per row, [N]."""
        column = batch.cache.get_seq_length()
        mask = batch.mask_up_to(column + 1, as_4d=self._bool_masks)
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
        """Logits [N, V] of the last of the columns [N, L], which are added to the cache."""
        logits: torch.Tensor = self._network(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    @torch.inference_mode()
    def _probe_kv_shapes(self) -> list[KVShape]:
        """What each layer really caches, from a pass over one token: configs name it in too many
        ways for a formula.
        """
        batch = self._padded([[0]], 1)
        self._prefill(batch)
        return batch.cache.kv_shapes()

    def _timed_rows(self, batch_size: int, length: int) -> list[list[int]]:
        """Random tokens; the first row is `length` long, the others shorter, down to 3/4 of it:
        real padding.
        """
        shortest = length - length // SHORTEST_SHARE
        lengths = [
            length - row * (length - shortest) // max(batch_size - 1, 1)
            for row in range(batch_size)
        ]
        generator = torch.Generator().manual_seed(length)
        tokens: list[list[int]] = torch.randint(
            self._shape.vocab, (batch_size, length), generator=generator
        ).tolist()
        return [row[:count] for row, count in zip(tokens, lengths, strict=True)]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _check_kv_bytes(spec: ModelSpec, measured: int) -> None:
    stated = spec.kv_bytes_per_token
    if stated is not None and stated != measured:
        raise InputError(
            f"model.kv_bytes_per_token is {stated}; the loaded model caches {measured} bytes per token",
            f"set it to {measured}, or leave it out",
        )
