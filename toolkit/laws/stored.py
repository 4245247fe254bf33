"""How files hold objects of plain classes: as mappings of their fields.

Compiled classes keep no annotations that pydantic could read, so it gets their schema from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from pydantic_core import core_schema

from toolkit.errors import InputError


def stored_schema(kind: Any, handler: Any, types: Mapping[str, Any]) -> core_schema.CoreSchema:
    """Return the schema of a dataclass: strict, without unknown keys. Fields that equal their
    default are not written.

    `types` are those of fields that are no plain numbers or text. A value that the constructor
    refuses with `InputError` is a problem of the file.
    """
    own = [each for each in fields(kind) if each.init]
    hints = get_type_hints(kind) | dict(types)
    record = core_schema.typed_dict_schema(
        {
            each.name: core_schema.typed_dict_field(
                handler.generate_schema(hints[each.name]), required=each.default is MISSING
            )
            for each in own
        },
        extra_behavior="forbid",
    )

    def read(found: dict[str, Any]) -> Any:
        try:
            return kind(**found)
        except InputError as error:
            raise ValueError(error.message) from None

    def written(one: Any) -> dict[str, Any]:
        values = {each.name: getattr(one, each.name) for each in own}
        return {each.name: values[each.name] for each in own if values[each.name] != each.default}

    from_file = core_schema.no_info_after_validator_function(read, record)
    return core_schema.json_or_python_schema(
        from_file,
        core_schema.union_schema([core_schema.is_instance_schema(kind), from_file]),
        serialization=core_schema.plain_serializer_function_ser_schema(
            written, return_schema=record
        ),
    )
