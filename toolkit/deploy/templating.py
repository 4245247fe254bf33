"""Templates for what is not YAML: shell, units, Markdown. A value that is missing is an error, never an empty string.

What goes into them is quoted for where it stands: `sh` for a shell, `unit` for a word of a command in a unit, `setting`
for a unit's whole value, `line` for a comment, `cell` for a Markdown table.
"""

from __future__ import annotations

import re
import shlex

import jinja2

from toolkit.errors import InputError
from toolkit.files.recipe import NAME_PATTERN
from toolkit.files.shipped import shipped_templates


def fill(name: str, /, **values: object) -> str:
    """The template `name` with these values. `InputError` for a name that is no template's."""
    if not re.fullmatch(NAME_PATTERN, name) or not (shipped_templates() / f"{name}.j2").is_file():
        raise InputError(f"{name!r} is not the name of a template", f"names match {NAME_PATTERN}")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(shipped_templates()),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # nothing here is HTML; every value has its own filter
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"sh": shlex.quote, "unit": unit_word, "setting": unit_setting, "cell": cell, "line": line}
    return environment.get_template(f"{name}.j2").render(**values)


def unit_setting(value: object) -> str:
    """A whole value in a unit file (systemd.unit): specifiers are doubled. `InputError` for what ends the line."""
    text = str(value)
    if any(ord(character) < 32 or ord(character) == 127 for character in text) or text.endswith("\\"):
        raise InputError(f"{text!r} cannot stand in a unit file", "choose another path or name")
    return text.replace("%", "%%")


def unit_word(value: object) -> str:
    """A word of a command in a unit file (systemd.service): variables are doubled as well, and the rest is quoted."""
    doubled = unit_setting(value).replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", doubled, re.ASCII):
        return doubled
    return '"' + doubled.replace("\\", "\\\\").replace('"', '\\"') + '"'


def cell(value: object) -> str:
    """Text in one cell of a Markdown table: no line breaks, no bars, no markup of its own."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\|`*<>\[\]])", r"\\\1", flat)


def line(value: object) -> str:
    """Text in one line of a comment."""
    return "".join(character if character.isprintable() else " " for character in str(value))
