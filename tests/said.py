"""What a message says, whatever words it says it with."""

import re


def says(text: str, *values: str) -> bool:
    """Whether `text` has each of these names, numbers and phrases, as whole words."""
    plain = " ".join(text.split())  # a terminal's width may break a phrase
    return all(re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", plain) for value in values)
