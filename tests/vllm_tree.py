"""The source files of a made-up vLLM that has all that llmctl touches: no code that runs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from toolkit.backends.vllm.touched import TOUCHED


def write(site: Path, version: str) -> Path:
    """Write the package into a folder of packages; returns its own folder."""
    folder = site / "vllm"
    modules: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    flags: list[str] = []
    metrics: list[str] = []
    for item in TOUCHED:
        if item.kind == "flag":
            flags.append(f'    parser.add_argument("{item.where}")')
            continue
        if item.kind == "metric":
            metrics.append(f'NAMES.append("{item.where}")')
            continue
        module, _, name = item.where.partition(":")
        owner, _, inner = name.partition(".")
        members = modules[module][owner]
        if item.kind == "attribute":
            members.append(f"    {inner}: int = 0")
        elif item.kind == "method" and inner:
            members.append(f"    def {inner}({', '.join(('self', *item.parameters))}): ...")
        elif item.kind == "method":
            members.append(f"def {owner}({', '.join(item.parameters)}): ...")
        elif owner == "main":
            members.append("def main(): ...")
    for module, owners in modules.items():
        lines = []
        for owner, members in owners.items():
            if members and members[0].startswith("def "):
                lines += members[:1]
            else:
                lines += [f"class {owner}:", *(members or ["    pass"])]
        _add(folder, module, lines)
    _add(folder, "vllm.engine.arg_utils", ["def add_cli_args(parser):", *flags])
    _add(folder, "vllm.v1.metrics.loggers", ["NAMES = []", *metrics])
    (folder / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    (folder / "__init__.py").touch()
    return folder


def _add(folder: Path, module: str, lines: list[str]) -> None:
    """Add lines to the file of a module."""
    file = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    before = file.read_text() if file.exists() else ""
    file.write_text(before + "\n".join(lines) + "\n")
