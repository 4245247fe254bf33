"""The sizes of a decoder, as the operators of a GPU need them: layers of a few sorts, each with
what mixes its tokens and what follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ACTIVATION_BYTES = 2  # of a number in bf16
Gemm = tuple[str, float, float]  # [m, k] x [k, n]: the precision of the weights, n and k
PLAIN_NORMS = 2  # norms of a layer: before what mixes tokens, and before what follows


@dataclass(frozen=True, slots=True)
class MixerShapes:
    """The sizes that all have that mix tokens.

    Attributes:
        heads: of queries; of linear attention, of values.
        weights, out: precisions of what makes queries, keys and values, and of what makes the
            output, keys of `WEIGHT_BYTES`.
    """

    heads: int
    weights: str = field(default="bfloat16", kw_only=True)
    out: str = field(default="bfloat16", kw_only=True)


@dataclass(frozen=True, slots=True)
class AttentionShapes(MixerShapes):
    """The sizes of grouped attention.

    Attributes:
        head_dim, value: numbers of a key, and of a value.
        window: tokens of a sliding window; 0: attention to all.
        gate: numbers of the output that share a value of a gate, which is made with the queries; 0:
            there is no gate.
        qk_norm: whether queries and keys are normalized.
        norm_reduces: all-reduces of one number per token that these norms need on several GPUs,
            where they span all heads.
    """

    kv_heads: int
    head_dim: int
    value: int
    window: int = 0
    gate: int = 0
    qk_norm: bool = False
    norm_reduces: int = 0

    def kv_heads_of(self, ranks: int) -> int:
        """KV heads of each of `ranks` GPUs; heads are repeated where there are fewer than GPUs."""
        return max(self.kv_heads // ranks, 1)

    def gemms(self, hidden: int, ranks: int) -> list[Gemm]:
        """Return the GEMMs of a layer: queries, keys, values and gates together, and the output."""
        heads = self.heads / ranks
        made = heads * self.head_dim + self.kv_heads_of(ranks) * (self.head_dim + self.value)
        if self.gate:
            made += heads * self.value / self.gate
        return [(self.weights, made, hidden), (self.out, hidden, self.value * heads)]


@dataclass(frozen=True, slots=True)
class LatentShapes(MixerShapes):
    """The sizes of multi-head latent attention.

    Attributes:
        rank: latent numbers of a token in the cache, of which keys and values are made.
        rope: numbers of a key with a position, which all heads share; cached, too.
        plain, value: of a head: numbers of a key without a position, and of a value.
        query_rank: latent numbers of the queries; 0: they are made of the hidden state.
        index_heads: of the queries of an index that finds the best tokens, which are made of the
            latent queries; 0: all tokens are attended to. Each GPU has all of the index.
        index_dim: numbers of a head of the index, and of its key, which is made of the hidden
            state.
        index_weights: precision of the index.
    """

    rank: int
    rope: int
    plain: int
    value: int
    query_rank: int = 0
    index_heads: int = 0
    index_dim: int = 0
    index_weights: str = "bfloat16"

    def gemms(self, hidden: int, ranks: int) -> list[Gemm]:
        """Return the GEMMs of a layer for all tokens: the latent vectors, which are whole on each
        GPU, queries, the output, and of an index, whole on each GPU, its queries and its keys.
        """
        heads = self.heads / ranks
        queries = heads * (self.plain + self.rope)
        found: list[Gemm] = [
            (self.weights, self.query_rank + self.rank + self.rope, hidden),
            (self.weights, queries, self.query_rank or hidden),
            (self.out, hidden, self.value * heads),
        ]
        if self.index_heads:
            found.append((self.index_weights, self.index_heads * self.index_dim, self.query_rank))
            found.append(("bfloat16", self.index_dim + self.index_heads, hidden))
        return found


@dataclass(frozen=True, slots=True)
class DeltaShapes(MixerShapes):
    """The sizes of gated delta-net attention, a linear attention with a state per request. Two
    numbers per head keep 16 bits.

    Attributes:
        key_heads: of queries and of keys.
        kernel: tokens of the convolution before it.
        key_dim, value_dim: numbers of a head; each has a state of their product.
        state_bytes: of a number of a state.
    """

    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int = 4

    @property
    def mixed(self) -> int:
        """Numbers of a token's queries, keys and values, which the convolution mixes."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def gemms(self, hidden: int, ranks: int) -> list[Gemm]:
        """Return the GEMMs of a layer: queries, keys and values, with as many gates of the output
        as values; two numbers per head; and the output.
        """
        heads = self.heads / ranks
        values = self.value_dim * heads
        return [
            (self.weights, self.mixed / ranks + values, hidden),
            ("bfloat16", 2 * heads, hidden),
            (self.out, hidden, values),
        ]


Mixer = AttentionShapes | LatentShapes | DeltaShapes


@dataclass(frozen=True, slots=True)
class LayerShapes:
    """Layers of one sort.

    Attributes:
        count: of such layers.
        mixer: what mixes tokens; None: nothing does.
        inner: of a gated MLP: of a dense one, or of a shared expert; 0: there is none.
        experts: whether there are experts.
        inner_weights, expert_weights: their precisions, keys of `WEIGHT_BYTES`.
        norms: of the hidden state.
        reduces: all-reduces of the hidden state on several GPUs.
    """

    count: int
    mixer: Mixer | None
    inner: int = 0
    experts: bool = False
    inner_weights: str = "bfloat16"
    expert_weights: str = "bfloat16"
    norms: int = PLAIN_NORMS
    reduces: int = 2

    def gemms(self, hidden: int, ranks: int) -> list[Gemm]:
        """Return the layer's GEMMs besides experts, of what mixes tokens and of the MLP."""
        found = self.mixer.gemms(hidden, ranks) if self.mixer is not None else []
        if self.inner:
            wide = self.inner / ranks
            found.append((self.inner_weights, 2 * wide, hidden))
            found.append((self.inner_weights, hidden, wide))
        return found


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The sizes of a decoder.

    Attributes:
        sorts: its layers; their order does not matter.
        experts: of a layer that has experts.
        cache_bytes: of a number in the KV cache.
        whole_experts: whether each of several GPUs has whole experts (expert parallelism), not a
            part of each.
        window: tokens, its own included, that a step attends to at most in some layers; 0: all.
    """

    hidden: int
    vocab: int
    sorts: tuple[LayerShapes, ...]
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    cache_bytes: int = ACTIVATION_BYTES
    whole_experts: bool = False
    window: int = 0

    @property
    def layers(self) -> int:
        """All layers."""
        return sum(sort.count for sort in self.sorts)
