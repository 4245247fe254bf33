"""`llmctl set`: the settings of a running server, shown or changed between two passes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.cli.arguments import (
    CONTROL_KEY_VARIABLE,
    JsonOptions,
    argument,
    command_of,
    option,
)
from toolkit.cli.output import emit, note, table

if TYPE_CHECKING:
    from toolkit.endpoints.settings import LiveState, SettingsClient

LOCAL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class SetOptions(JsonOptions):
    settings: list[str] | None = argument(
        "New values; none: show the settings and their bounds.", None, metavar="KEY=VALUE"
    )
    url: str = option(LOCAL, "The server, which was started with `serve --live`.")


@command_of(SetOptions)
def command(args: SetOptions) -> None:
    """Change settings of a running server between two passes, without a restart: all of the values
    are taken, or none. Without any, show the settings with their bounds.

    The server is a vLLM of `llmctl serve PLAN.json --live`. No accepted request is dropped: with
    fewer requests at once, running ones end first. A value outside its bounds is refused with the
    bounds.
    """
    import msgspec

    from toolkit.sched.policies.parameters import from_words

    client = control_of(args.url)
    asked = from_words(args.settings or [])
    state = client.set(asked, "llmctl set") if asked else client.get()
    emit(args.as_json, msgspec.to_builtins(state), lambda: _show(state))
    if asked:
        words = ", ".join(f"{name}={value}" for name, value in state.changed.items())
        note(f"changed from the next pass on: {words}" if words else "nothing changed")


def control_of(url: str, owner: str = "") -> SettingsClient:
    """Return the control of the server at `url`, with the key of the environment
    (`CONTROL_KEY_VARIABLE`).
    """
    from toolkit.endpoints.settings import SettingsClient

    return SettingsClient(url, os.environ.get(CONTROL_KEY_VARIABLE, ""), owner)


def _show(state: LiveState) -> None:
    from toolkit.sched.policies.parameters import LARGEST_WHOLE

    rows = []
    for one in state.settings:
        bounds = ", ".join(json.dumps(choice).strip('"') for choice in one.choices)
        if one.low is not None:
            unlimited = one.high is None or one.high >= LARGEST_WHOLE
            bounds = f"at least {one.low:g}" if unlimited else f"{one.low:g} to {one.high:g}"
        rows.append([one.name, _word(one.value), _word(one.start), bounds])
    table(["setting", ">now", ">at the start", "bounds"], rows)
    if state.word:
        note(f"newest: {state.word}")
    if state.lease is not None:
        note(f"{state.lease.owner} tunes it, and holds the settings")


def _word(value: object) -> str:
    return json.dumps(value).strip('"')
