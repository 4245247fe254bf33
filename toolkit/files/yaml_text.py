"""Typed objects as YAML that every reader takes for the same data: block style, fixed order, text quoted unless plain.

PyYAML writes `1e3`, `0o17` and `1_000` unquoted, which are numbers to YAML 1.2 readers as Kubernetes and Compose have
them, and `y` and `12:30`, which are not text to 1.1's. Here only what looks like nothing else goes unquoted; whatever
is not printable ASCII is escaped. So no value can become a key, a comment or a document of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import yaml
from pydantic import BaseModel

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that indents lists, never writes aliases, and quotes what is not plain."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = PLAIN.fullmatch(value) and value.lower() not in RESERVED
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else '"')


_Dumper.add_representer(str, _text)


def dump_yaml(documents: Sequence[BaseModel | Mapping[str, object]], comment: str = "") -> str:
    """The documents, one after the other; `comment` goes before them, each of its lines behind a `#`.

    Models are written under their aliases, without what is None. The same objects give the same text.
    """
    content = [
        one.model_dump(by_alias=True, exclude_none=True) if isinstance(one, BaseModel) else one for one in documents
    ]
    body = yaml.dump_all(
        content,
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=False,
        width=1 << 20,
        explicit_start=len(content) > 1,
    )
    return "".join(f"# {line}\n" for line in comment.splitlines()) + body
