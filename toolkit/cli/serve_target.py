"""`llmctl serve --target`: where a server is to run, from what was rendered, and remembering those that run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from toolkit.cli.output import WIDTH, emit, note

if TYPE_CHECKING:
    from ssl import SSLContext

    from toolkit.deploy.folder import Manifest
    from toolkit.deploy.running import Running, Where
    from toolkit.files.plan import Plan
    from toolkit.serve.keys import Callers
    from toolkit.serve.rereading import Source

HERE = ("local", "ray")  # the server is this process
MANAGED = ("systemd", "compose")
ELSEWHERE = {
    "kubernetes": "kubectl apply -k {folder}",
    "vllm": "{folder}/serve.sh",
    "sglang": "{folder}/serve.sh",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where to serve; `plan` is the plan's file in a rendered folder, and None where none was given."""

    target: str
    folder: Path | None = None
    manifest: Manifest | None = None

    @property
    def plan(self) -> str | None:
        return None if self.folder is None else str(self.folder / "plan.json")

    @property
    def managed(self) -> bool:
        return self.target in MANAGED


def place_of(source: str | None, target: str | None) -> Place:
    """Where `source` is to be served. `InputError` for a target that serve cannot start, or that was not rendered."""
    from toolkit.deploy.folder import read_manifest
    from toolkit.errors import InputError, nearest

    folder = Path(source) if source and Path(source).is_dir() else None
    manifest = read_manifest(folder) if folder else None
    if folder and manifest is None:
        raise InputError(f"{folder}: nothing was rendered to this folder", "llmctl render PLAN.json --target TARGET")
    chosen = target or (manifest.target if manifest else "local")
    if chosen in ELSEWHERE:
        command = ELSEWHERE[chosen].format(folder=folder or "FOLDER")
        raise InputError(f"serve does not start the target '{chosen}'", f"start it with: {command}")
    if chosen not in HERE + MANAGED:
        raise InputError(f"there is no target '{chosen}' to serve", nearest(chosen, HERE + MANAGED))
    if chosen in MANAGED and (manifest is None or manifest.target != chosen):
        raise InputError(
            f"the target '{chosen}' is served from a folder that was rendered for it",
            f"llmctl render PLAN.json --target {chosen}; then: llmctl serve {chosen}",
        )
    return Place(chosen, folder, manifest)


def serve_managed(place: Place, as_json: bool, *, broken: bool) -> None:
    """Hand the folder to its service manager, and remember the server.

    `InputError` where its plan is predicted to break limits, unless `broken` ones may be.
    """
    from toolkit.cli.basis import accept
    from toolkit.deploy.managers import start
    from toolkit.deploy.running import Running, name_of, remember
    from toolkit.files.io import read_file
    from toolkit.files.limits import breaks
    from toolkit.files.plan import Plan
    from toolkit.serve.assemble import model_name

    assert place.folder is not None
    assert place.manifest is not None
    plan = read_file(Plan, place.folder / "plan.json")
    accept(plan, str(place.folder / "plan.json"), broken=broken)
    start(place.folder, place.manifest)
    url = f"http://127.0.0.1:{plan.recipe.serve.port or 8000}"
    server = Running(
        name=name_of(plan.recipe.name, url),
        target="systemd" if place.target == "systemd" else "compose",
        url=url,
        model=model_name(plan),
        workers=plan.workers,
        policy=plan.policy.name,
        folder=str(place.folder.absolute()),
        breaks=breaks(plan.limits),
    )
    remember(server)
    emit(as_json, server, lambda: _show_managed(server))


def _show_managed(server: Running) -> None:
    print(f"ready: {server.url} serves {server.model}, by {server.target}")
    if server.breaks:
        print(fill(f"warning: predicted to {server.breaks}", WIDTH, subsequent_indent="  "))


class Memory:
    """What this process is remembered as while it serves."""

    def __init__(self, target: Where) -> None:
        self._target = target
        self._server: Running | None = None

    def ready(self, url: str, model: str, plan: Plan, certificate: Path | None = None) -> None:
        """Write the file; `certificate` is what the server shows.

        A folder that cannot be written, as in a container, costs `llmctl status`, not the server.
        """
        from toolkit.deploy.running import name_of, remember, this_process
        from toolkit.errors import InputError
        from toolkit.files.limits import breaks

        name = name_of(plan.recipe.name, url)
        server = this_process(name, self._target, url, model, plan.workers, plan.policy.name)
        server = server.model_copy(update={"breaks": breaks(plan.limits)})
        if certificate is not None:
            server = server.model_copy(update={"certificate": str(certificate.absolute())})
        try:
            remember(server)
        except InputError as error:
            note(f"llmctl status will not know this server: {error.message}")
            return
        self._server = server

    def ended(self, requests: Mapping[str, int]) -> None:
        """Say how its requests ended, for `llmctl stop`, which waits for that."""
        from toolkit.deploy.running import remember

        if self._server is not None:
            remember(self._server.model_copy(update={"ended": dict(requests)}))
            self._server = None

    def forget(self) -> None:
        """Remove the file of a server that did not end in order."""
        from toolkit.deploy.running import forget

        if self._server is not None:
            forget(self._server)


@contextlib.contextmanager
def remembering(target: str) -> Iterator[Memory]:
    """A memory that leaves nothing behind where the server fails."""
    memory = Memory("ray" if target == "ray" else "local")
    try:
        yield memory
    finally:
        memory.forget()


def read_key(given: str, file: Path | None) -> str:
    """The API key: given, or the one line of a file. `InputError` for both, and for a file that holds none."""
    from toolkit.errors import InputError

    if file is None:
        return given.strip()
    if given:
        raise InputError("the API key is given twice", "keep one of --api-key-file and --api-key or LLMCTL_API_KEY")
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise InputError(f"{file}: cannot be read: {reason}", "it holds the API key, in one line") from None
    if not key or len(key.split()) != 1:
        raise InputError(f"{file}: no API key in it", "it holds the key alone, in one line")
    return key


def find_callers(given: str, file: Path | None, keys: Path | None) -> tuple[Callers, Source[Callers] | None]:
    """The API key, or the keys of a file; and where a file may change while the server runs, that file.

    `InputError` for both, and for a file that holds none.
    """
    from toolkit.errors import InputError
    from toolkit.files.keys import read_keys
    from toolkit.serve.rereading import Source

    if keys is not None and (given or file is not None):
        raise InputError("there is an API key, and a file of keys", "keep one of --api-keys and --api-key or its kin")
    if keys is not None:
        source: Source[Callers] = Source([keys], lambda: ("", read_keys(keys)))
    elif file is not None and not given:
        source = Source([file], lambda: (read_key("", file), ()))
    else:
        return (read_key(given, file), ()), None
    return source.value, source


def find_certificate(certificate: Path | None, key: Path | None) -> Source[SSLContext] | None:
    """What TLS is spoken with; None: it is not. `InputError` for a key alone, and for files that hold no such thing."""
    from toolkit.errors import InputError
    from toolkit.serve.certificate import certificate_source

    if certificate is None:
        if key is not None:
            raise InputError("--ssl-keyfile without a certificate", "give --ssl-certfile as well")
        return None
    return certificate_source(certificate, key)
