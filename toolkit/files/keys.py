"""The keys file of a server: who may call, by name, and how much of it each may take.

It holds the sha256 of keys and no key, so it may be read, mailed and kept in version control. A
plain digest is enough for what nobody can guess: keys are long and random, unlike passwords.
Recipes and plans do not name the file: they say what is served and travel; who may call belongs to
the place where the server runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from toolkit.errors import InputError
from toolkit.files.recipe import Name, Positive
from toolkit.files.strict import Strict, load_yaml, validate

MAX_KEYS = 100  # each has its own metrics
HINT = "see docs/serving.md, 'Several keys'"


class ApiKey(Strict):
    """One caller. What has no limit here is limited by the server's own only."""

    name: Name
    sha256: str = Field(
        description="of the key's bytes, without a line break: printf %s KEY | sha256sum"
    )
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = Field(default=None, description="prompt and output")
    max_concurrent: Positive | None = Field(
        default=None,
        description="choices of requests that wait or run: a request for n counts n times",
    )

    urgent: bool = Field(default=False, description="whether it may ask for a negative `priority`")

    @field_validator("sha256", mode="before")
    @classmethod
    def _is_digest(cls, given: object) -> object:
        # pydantic's own message would show what was given, and that may be the key
        if not (isinstance(given, str) and re.fullmatch(r"[0-9a-f]{64}", given)):
            raise ValueError("should be 64 hexadecimal digits, from: printf %s KEY | sha256sum")
        if given == hashlib.sha256(b"").hexdigest():
            raise ValueError("this is the sha256 of nothing at all")
        return given

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class KeysFile(Strict):
    """Everybody who may call."""

    keys: Annotated[list[ApiKey], Field(min_length=1, max_length=MAX_KEYS)]

    @model_validator(mode="after")
    def _tells_apart(self) -> KeysFile:
        names = Counter(one.name for one in self.keys)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice:
            raise ValueError(f"two keys are called '{twice}'")
        owners: dict[str, str] = {}
        for one in self.keys:
            if one.sha256 in owners:
                raise ValueError(f"'{owners[one.sha256]}' and '{one.name}' have the same key")
            owners[one.sha256] = one.name
        return self


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file. `InputError` for one that is no keys file, and for one that anybody may
    change.
    """
    data = load_yaml(path)
    if path.stat().st_mode & stat.S_IWOTH:
        raise InputError(
            f"{path.name}: every user of this machine may write to it", f"chmod o-w {path}"
        )
    if not isinstance(data, dict):
        raise InputError(
            f"{path.name}: there is no list of keys in it", f"it starts with `keys:`; {HINT}"
        )
    return tuple(validate(KeysFile, json.dumps(data), path, HINT).keys)
