"""What measurements hold for: one device, one version of one engine, one model. Said in words, and compared.

Times and memory of another GPU, engine or model look as good as the right ones, so whoever would use them compares
first and refuses, naming both sides. What either side does not know is not compared: a recipe's hardware is a claim, a
foreign server tells little, and files of earlier versions say less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from toolkit.errors import ForeignError
from toolkit.files.profile import EngineFacts

Identity = Mapping[str, str]  # what it is to what it is called; absent: not known
OnForeign = Callable[[str], None]

REMEDY = "profile and fit it here, or go on with --force: times and memory may then be wrong"


def identity(facts: EngineFacts) -> dict[str, str]:
    """What `facts` were measured on, or are of. Without the device and the versions where nothing was measured."""
    engine, device = facts.engine, facts.device
    where = {
        "device": f"CPU {facts.processor}".strip() if device == "cpu" else device,
        "engine": f"{engine} {facts.engine_version}".strip(),
        "torch": ".".join(facts.torch.split(".")[:2]),
    }
    what = {
        "model": _model(facts),
        "model_config": facts.config_sha256[:12],
        "dtype": facts.dtype,
        "tensor_parallel_size": str(facts.tensor_parallel_size),
    }
    known = ({"engine": engine} if facts.analytic else where) | what
    return {name: value for name, value in known.items() if value}


def differences(made: Identity, here: Identity) -> list[str]:
    """Where both know and do not agree: 'device NVIDIA A100 (here NVIDIA H100)'."""
    return [
        f"{name} {made[name]} (here {here[name]})"
        for name in made
        if name in here and not _same(made[name], here[name])
    ]


def refuse_foreign(made: EngineFacts, here: Iterable[Identity], on_foreign: OnForeign | None = None) -> None:
    """`ForeignError` where what was measured on `made` is used on something else; `on_foreign` is told instead."""
    for each in here:
        found = differences(identity(made), each)
        if not found:
            continue
        message = f"the fit was made with another {', another '.join(found)}"
        if on_foreign is None:
            raise ForeignError(message, REMEDY)
        on_foreign(message)
        return


def _model(facts: EngineFacts) -> str:
    return f"{facts.model_type} of {facts.parameters:,} parameters" if facts.parameters else facts.model_type


def _same(one: str, other: str) -> bool:
    """A name alone, 'transformers' or 'CPU', is the same as one with its version or its kind."""
    short, long = sorted((one, other), key=len)
    return one == other or (" " not in short and long.startswith(f"{short} "))
