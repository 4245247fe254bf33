"""Sampling: which tokens are drawn, how often, and that a draw depends only on its row."""

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from benchmarks.common.plugins.llmctl_fake import mix
from toolkit.engines.protocol import Row, SamplingParams
from toolkit.engines.sampling import AHEAD, Sampler, uniforms

pytestmark = pytest.mark.slow

VOCAB = 8
CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.9])


def row(generated: int = 0, tokens: tuple[int, ...] = (1,), **sampling: object) -> Row:
    return Row("r", tokens, generated, 100, SamplingParams(**sampling))  # type: ignore[arg-type]


def draw(
    rows: list[Row],
    logits: torch.Tensor | None = None,
    step: int = 0,
    eos_ids: tuple[int, ...] = (),
) -> list[int]:
    if logits is None:
        logits = LOGITS.repeat(len(rows), 1)
    return Sampler(rows, eos_ids, logits.shape[1], CPU).draw(logits.clone(), step).tolist()


def drawn_set(count: int = 2000, **sampling: object) -> set[int]:
    return set(draw([row(temperature=1.0, seed=seed, **sampling) for seed in range(count)]))


def test_greedy_takes_the_largest() -> None:
    assert draw([row(), row(temperature=1e-6)]) == [0, 0]


@pytest.mark.parametrize("along_a_text", [False, True])
def test_draws_follow_the_distribution(along_a_text: bool) -> None:
    count = 20_000
    rows = [
        row(generated=k, temperature=0.8, seed=3) if along_a_text else row(temperature=0.8, seed=k)
        for k in range(count)
    ]
    shares = torch.bincount(torch.tensor(draw(rows)), minlength=VOCAB) / count
    expected = (LOGITS / 0.8).softmax(dim=0)
    sigma = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() < 4 * sigma).all()


def test_a_draw_does_not_depend_on_the_batch() -> None:
    rows = [
        row(generated=index, temperature=1.0, seed=index % 3, top_p=0.9, top_k=index % 5)
        for index in range(20)
    ]
    assert draw(rows) == [draw([row])[0] for row in rows] == draw(rows[::-1])[::-1]


def test_a_draw_depends_on_the_position_in_the_text() -> None:
    whole = [draw([row(temperature=1.0, seed=5)], step=step) for step in range(30)]
    later = [draw([row(generated=10, temperature=1.0, seed=5)], step=step) for step in range(20)]
    assert whole[10:] == later
    assert len({token for (token,) in whole}) > 2


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 7}),
        ({"top_k": 100}, set(range(8))),
        ({"top_p": 0.0}, {0}),
        ({"top_p": 0.4}, {0, 7}),
        ({"min_p": 0.9}, {0, 7}),
        ({"min_p": 0.3}, {0, 1, 7}),
        ({"top_k": 3, "top_p": 0.5}, {0, 7}),  # of the three best, the first has 0.42
        ({"min_p": 1.0}, {0}),
        ({}, set(range(8))),
    ],
)
def test_only_tokens_that_pass_the_filters_are_drawn(
    sampling: dict[str, object], allowed: set[int]
) -> None:
    assert drawn_set(**sampling) == allowed


def test_the_repetition_penalty_is_transformers_own() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    rows = [row(tokens=(index, index + 1), repetition_penalty=1.7) for index in range(4)]
    penalised = [
        RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([one.tokens]), logits[index : index + 1])
        for index, one in enumerate(rows)
    ]
    assert draw(rows, logits) == torch.cat(penalised).argmax(dim=-1).tolist()


def test_the_penalty_counts_tokens_of_this_slice() -> None:
    sampler = Sampler([row(tokens=(3,), repetition_penalty=1.5)], (), VOCAB, CPU)
    assert [sampler.draw(LOGITS[None].clone(), step).item() for step in range(3)] == [
        0,
        7,
        0,
    ]  # 2/1.5 < 1.9, 1.9/1.5


def test_eos_is_not_drawn_before_min_tokens() -> None:
    kept = row(generated=2, min_tokens=4, stop_token_ids=(7,))
    assert [draw([kept], step=step, eos_ids=(0,)) for step in range(3)] == [[1], [1], [0]]


def test_a_regrouped_sampler_draws_the_same_tokens() -> None:
    rows = [
        row(tokens=(index,), temperature=1.0, seed=index, repetition_penalty=1.4)
        for index in range(4)
    ]
    apart = [Sampler([row], (), VOCAB, CPU) for row in rows]
    whole = [
        [sampler.draw(LOGITS[None].clone(), step).item() for step in range(6)] for sampler in apart
    ]
    first = Sampler(rows[:3], (), VOCAB, CPU)
    begin = [first.draw(LOGITS.repeat(3, 1), step).tolist() for step in range(3)]
    later = first.regrouped([2, 0], [rows[3]], 3)
    rest = [later.draw(LOGITS.repeat(3, 1), step).tolist() for step in range(3)]
    assert [[step[index] for step in begin] for index in range(3)] == [
        text[:3] for text in whole[:3]
    ]
    assert [[step[index] for step in rest] for index in range(3)] == [
        whole[2][3:],
        whole[0][3:],
        whole[3][:3],
    ]


def test_a_penalty_joins_rows_that_have_none() -> None:
    sampler = Sampler([row(tokens=(0,))], (), VOCAB, CPU).regrouped(
        [0], [row(tokens=(0,), repetition_penalty=2.0)], 0
    )
    assert sampler.draw(LOGITS.repeat(2, 1), 0).tolist() == [0, 7]


def test_numbers_of_many_draws_are_those_of_each_draw() -> None:
    seeds = [0, 1, 7, -3, (1 << 63) - 1, -(1 << 63), 0x9E3779B97F4A7C15 - (1 << 64)]
    positions = torch.tensor([0, 1, 63, 64, 1 << 40])
    found = uniforms(torch.tensor(seeds)[:, None], positions[None, :])
    # 32 random bits each: few enough that a product with a sum in 64 bits stays below the sum
    expected = [[(mix(s, p) >> 32) * 2.0**-32 for p in positions.tolist()] for s in seeds]
    assert found.tolist() == expected


def test_draws_past_the_prepared_ones_are_a_new_sampler_s() -> None:
    rows = [row(generated=start, temperature=1.0, seed=start) for start in (0, 5, 900)]
    sampler = Sampler(rows, (), VOCAB, CPU)
    for step in (0, AHEAD - 1, AHEAD, 3 * AHEAD + 2):
        later = [
            row(generated=each.generated + step, temperature=1.0, seed=each.sampling.seed)
            for each in rows
        ]
        assert sampler.draw(LOGITS.repeat(3, 1), step).tolist() == draw(later)
