"""The keys file of a server: the clients that may call it, by name, each with its limits.

The file holds sha256 digests instead of keys, so it may be read, mailed and kept in version
control. Keys are long and random, unlike passwords, so a plain digest cannot be guessed back.
Recipes and plans do not name this file: they describe what is served and move between machines,
while the allowed clients belong to the place where the server runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from toolkit.errors import InputError
from toolkit.files.recipe import Name, Positive
from toolkit.files.strict import Strict, load_yaml, validate

MAX_KEYS = 100  # each has its own metrics
HINT = "see docs/how-to/serve.md, 'Several keys'"


class ApiKey(Strict):
    """One client. Where a limit is None, only the server's own limits hold."""

    name: Name
    sha256: str = Field(
        description="of the key's bytes, without a line break: printf %s KEY | sha256sum"
    )
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = Field(default=None, description="prompt and output")
    max_concurrent: Positive | None = Field(
        default=None,
        description="choices of waiting and running requests: a request for n counts n times",
    )
    urgent: bool = Field(default=False, description="whether it may ask for a negative `priority`")

    @field_validator("sha256", mode="before")
    @classmethod
    def _is_digest(cls, given: object) -> object:
        # pydantic's own message would show the given value, which may be the key itself.
        if not (isinstance(given, str) and re.fullmatch(r"[0-9a-f]{64}", given)):
            raise ValueError("should be 64 hexadecimal digits, from: printf %s KEY | sha256sum")
        if given == hashlib.sha256(b"").hexdigest():
            raise ValueError("this is the sha256 of empty input")
        return given

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256)


class KeysFile(Strict):
    """All clients that may call."""

    keys: Annotated[list[ApiKey], Field(min_length=1, max_length=MAX_KEYS)]

    @model_validator(mode="after")
    def _names_and_keys_are_unique(self) -> KeysFile:
        names: set[str] = set()
        owners: dict[str, str] = {}
        for key in self.keys:
            if key.name in names:
                raise ValueError(f"two keys are called '{key.name}'")
            if key.sha256 in owners:
                raise ValueError(f"'{owners[key.sha256]}' and '{key.name}' have the same key")
            names.add(key.name)
            owners[key.sha256] = key.name
        return self


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file.

    Raises `InputError` for a file that is not a keys file or that every user may write to.
    """
    data = load_yaml(path)
    if path.stat().st_mode & stat.S_IWOTH:
        raise InputError(
            f"{path.name}: every user of this machine may write to it", f"chmod o-w {path}"
        )
    if not isinstance(data, dict):
        raise InputError(
            f"{path.name}: it holds no list of keys", f"it starts with `keys:`; {HINT}"
        )
    return tuple(validate(KeysFile, json.dumps(data), path, HINT).keys)
