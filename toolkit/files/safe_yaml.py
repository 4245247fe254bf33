"""YAML as recipes may use it: one document of plain data in YAML 1.2's core schema, with bounds.

PyYAML's safe loader still accepts duplicate keys (the last one wins), anchors and aliases (which can blow a small file
up to gigabytes), and YAML 1.1's surprises: `no` is false, `1e-3` a string, `1:30` ninety. Here the first two and tags
are errors that name their line, and scalars are read the way editors and JSON Schema read them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import InputError

MAX_BYTES = 1 << 20
MAX_DEPTH = 16


def load_yaml(path: Path) -> object:
    """The document in `path`, as dicts, lists and scalars. `InputError` names the line and column of what is wrong."""
    text = _read_text(path)
    try:
        return _RecipeLoader(text).get_single_data()
    except _RefusedError as error:
        raise InputError(f"{path.name}: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path.name}: {_describe(error)}", "check the indentation and quotes there") from None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise InputError(f"{path.name}: larger than {MAX_BYTES >> 20} MiB", "a recipe is a page or two of text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path.name}: byte {error.start} is not UTF-8", "save the file as UTF-8") from None


def _describe(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position} is not allowed in YAML: {error.reason}"
    return f"not YAML: {error}"


class _RefusedError(Exception):
    """YAML that is well formed and not allowed here."""

    def __init__(self, problem: str, mark: Any) -> None:
        super().__init__(f"line {mark.line + 1}, column {mark.column + 1}: {problem}")


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader without anchors, aliases, tags, duplicate keys, deep nesting and the YAML 1.1 scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs lack it
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError(f"alias *{event.anchor}: write the value out", event.start_mark)
        if event.anchor is not None:
            raise _RefusedError(f"anchor &{event.anchor}: anchors are not allowed", event.start_mark)
        if event.tag is not None:
            raise _RefusedError(f"tag {event.tag}: tags are not allowed", event.start_mark)
        if self.depth >= MAX_DEPTH:
            raise _RefusedError(f"nested more than {MAX_DEPTH} deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise _RefusedError("half a surrogate pair is not text", node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                shown = key.value if isinstance(key, yaml.ScalarNode) else "[...]"
                raise _RefusedError(f"key {shown}: keys must be text", key.start_mark)
            if key.value in seen:
                raise _RefusedError(f"duplicate key '{key.value}', first on line {seen[key.value]}", key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


# YAML 1.2, section 10.3.2 (core schema), without octal and hexadecimal. PyYAML would read 010 as octal.
_RecipeLoader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
for _tag, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9]{1,18}$", list("-+0123456789")),
    (
        "float",
        r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|nan)$",
        list("-+.0123456789"),
    ),
):
    _RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
