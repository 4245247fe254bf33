"""What `bench/oom.py` says of texts that differ."""

from types import SimpleNamespace
from typing import cast

import oom
import tiny
from rounds import generated_alone

from toolkit.engines.protocol import Row
from toolkit.engines.tokenizer import ByteTokenizer
from toolkit.files.plan import Plan

PLAN = cast(
    Plan, SimpleNamespace(recipe=SimpleNamespace(model=tiny.model_spec(), hardware=tiny.CPU))
)
ASKS = [oom.Ask("abc", 12), oom.Ask("some other words", 12)]


def run(*texts: str) -> oom.Run:
    return oom.Run(list(texts), 0, 1.0, 0.0, 1.0, 0)


def test_a_text_that_differs_is_named_with_how_near_the_logits_are_there() -> None:
    rows = [Row("alone", tuple(ask.prompt.encode()), 0, ask.tokens) for ask in ASKS]
    texts = [ByteTokenizer().decode(tokens) for tokens in generated_alone("llama", rows)]
    other = texts[1][:2] + "\N{SNOWMAN}" + texts[1][3:]
    assert oom.differences(PLAN, ASKS, texts, [run(*texts)]) == []
    (found,) = oom.differences(PLAN, ASKS, texts, [run(*texts), run(texts[0], other)])
    assert (found.request, found.position) == (1, 2)
    assert 0.0 < found.logits_apart < 10.0
