"""What every file of the workflow shares: strict models, versions, environment, and the digests of its inputs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A model that refuses unknown keys, NaN and infinity, and does not change once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, protected_namespaces=()
    )


class Environment(Strict):
    """The machine and the versions a file was made with. No host names, no paths."""

    python: str
    platform: str
    processor: str
    cpu_count: int
    packages: dict[str, str] = Field(description="versions of the packages that decide the numbers")
    device: str = Field(description="cpu, or the GPU's name")
    device_memory_bytes: int | None = None


class Input(Strict):
    """A file that another was made from."""

    name: str = Field(description="file name without its folder")
    sha256: str
    sections: dict[str, str] = Field(
        default_factory=dict, description="of a recipe: the sha256 of each section's content"
    )


class Envelope(Strict):
    """The common head of profile.json, fit.json, tuning.json and plan.json."""

    remake: ClassVar[str] = ""  # the command that makes this kind of file, for error messages
    remeasure: ClassVar[str] = ""  # the same where the recipe changed, if that takes more
    recipe_sections: ClassVar[tuple[str, ...]] = ()  # those that this kind of file depends on

    schema_version: Literal[1] = 1
    tool_version: str
    environment: Environment
    inputs: dict[str, Input] = Field(description="role (recipe, profile, fit, trace, ...) to file, theirs included")
