"""Parameters of policy `vllm` as vLLM's own flags."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import Value, parameters

POLICY = "vllm"
SWITCHES = {"chunked_prefill": "enable-chunked-prefill", "prefix_caching": "enable-prefix-caching"}


def flags_of(policy: str, given: Mapping[str, Value], *, prefix_caching: bool | None = None) -> list[str]:
    """The flags of a policy's parameters, all of them; none for another policy, which runs inside with vLLM's own.

    `prefix_caching`, where it is said, holds whatever the parameters say. `InputError` for what is no parameter.
    """
    if policy != POLICY:
        return [] if prefix_caching is None else [_switch("enable-prefix-caching", prefix_caching)]
    found = parameters(make_any(policy, given))
    if prefix_caching is not None:
        found["prefix_caching"] = prefix_caching
    words: list[str] = []
    for name, value in found.items():
        if isinstance(value, bool):
            words.append(_switch(SWITCHES[name], value))
        else:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _switch(flag: str, on: bool) -> str:
    return f"--{flag}" if on else f"--no-{flag}"
