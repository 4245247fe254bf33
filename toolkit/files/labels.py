"""Labels of machines, by which a kind of workers finds its own: Kubernetes' syntax, which is Ray's as well."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
VALUE_PATTERN = rf"^{_NAME}$"
LabelKey = Annotated[str, Field(pattern=rf"^([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_NAME}$")]
LabelValue = Annotated[str, Field(pattern=VALUE_PATTERN)]
Labels = dict[LabelKey, LabelValue]
