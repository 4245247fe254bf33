"""Sizes of models that many people run, so that `llmctl recipe new` needs no network for them.

data/models.yaml has facts only: the keys of the published config.json that sizes depend on.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.catalogue.quantization import Config
from toolkit.catalogue.tables import read_table


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with sizes that ship with llmctl.

    Attributes:
        name: as `llmctl recipe new` takes it.
        hub: its id on the hub.
        revision: the commit there.
        config: the keys of its config.json that sizes depend on.
        source: where the config was read.
        gated: whether the hub asks to accept a licence first.
    """

    name: str
    hub: str
    revision: str
    config: Config
    source: str
    gated: bool = False


KNOWN = {one["name"]: KnownModel(**one) for one in read_table("models")}


def known_model(name: str) -> KnownModel | None:
    """Return the known model of a name, a hub id, or the last part of one; None: there is none."""
    wanted = name.lower()
    for model in KNOWN.values():
        if wanted in (model.name, model.hub.lower(), model.hub.lower().partition("/")[2]):
            return model
    return None
