"""Stop strings and token counts do not depend on how tokens are grouped."""

from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.tokenizer import ByteDetokenizer
from toolkit.server.live import TextOutput

PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def find(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    shown, _, finish = feed_all([*[piece.encode() for piece in pieces], b""], "length", stops=stops)
    return shown, finish == "stop"


@given(PIECES, STOPS)
def test_a_stop_string_is_found_for_every_split(pieces: list[str], stops: list[str]):
    assert find(pieces, stops) == find(list("".join(pieces)), stops)


@given(PIECES, STOPS)
def test_shown_text_has_no_stop_string_and_nothing_missing(pieces: list[str], stops: list[str]):
    shown, stopped = find(pieces, stops)
    whole = "".join(pieces)
    assert not any(stop in shown for stop in stops)
    assert whole.startswith(shown)
    assert stopped == any(stop in whole for stop in stops)
    assert stopped or shown == whole


def test_the_match_that_ends_first_wins_then_the_longer():
    assert find(["xabcx"], ["abcx", "b"]) == ("xa", True)
    assert find(["xabx"], ["b", "ab"]) == ("x", True)


def feed_all(chunks: list[bytes], finish: str, **options) -> tuple[str, int, str]:
    """The text, the tokens up to its end, and how it ended."""
    output = TextOutput(ByteDetokenizer(), **options)
    shown = ""
    for last, chunk in _marked(chunks):
        text, ended = output.feed(chunk, finish if last else "")
        shown += text
        if ended:
            break
    return shown, output.tokens, ended


def _marked(chunks: list[bytes]) -> list[tuple[bool, bytes]]:
    return [(index == len(chunks) - 1, chunk) for index, chunk in enumerate(chunks)]


def test_tokens_count_up_to_the_stop_for_every_grouping():
    expected = ("ab", 4, "stop")
    assert feed_all([b"abcdef"], "length", stops=["cd"]) == expected
    assert feed_all([b"abc", b"def"], "length", stops=["cd"]) == expected
    assert feed_all([b"a", b"b", b"c", b"d", b"e"], "length", stops=["cd"]) == expected


def test_an_incomplete_stop_string_is_shown_at_the_end():
    assert feed_all([b"abc"], "length", stops=["cd"]) == ("abc", 3, "length")


def test_the_token_that_ended_the_row_counts_and_is_not_shown():
    assert feed_all([b"ab", [*b"c", 257]], "stop") == ("abc", 4, "stop")
    assert feed_all([[*b"abc", 257]], "stop", stops=["zz"]) == ("abc", 4, "stop")


def test_stop_strings_are_not_looked_for_before_min_tokens():
    assert feed_all([b"abab"], "length", stops=["a"], min_tokens=2) == ("ab", 3, "stop")


class Halves:
    """A character is two tokens, as in bytes of UTF-8."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def feed(self, tokens) -> str:
        self.held += tokens
        whole = self.held[: len(self.held) // 2 * 2]
        self.held = self.held[len(self.held) // 2 * 2 :]
        return bytes(whole[::2]).decode()

    def flush(self) -> str:
        return "?" if self.held else ""


def test_half_a_character_at_the_end_is_shown_as_a_replacement():
    output = TextOutput(Halves(), ["x"])
    assert output.feed(b"aab", "") == ("a", "")
    assert output.feed(b"bc", "length") == ("b?", "length")
    assert output.tokens == 5


def test_a_stop_string_in_the_last_flush_ends_the_text():
    output = TextOutput(Halves(), ["?"])
    assert output.feed(b"aab", "length") == ("a", "stop")
    assert output.tokens == 3
