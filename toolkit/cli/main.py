"""`llmctl`: the table of commands, and where errors become exit codes.

`llmctl --help` lists the commands from the table below, by groups, and imports none of them, which
keeps it fast; a command's module is imported when the command is called.
"""

from __future__ import annotations

import errno
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import toolkit
from toolkit import interrupts
from toolkit.cli.output import ABOUT, note, show_any_text
from toolkit.errors import InputError, LlmctlError, nearest

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
LONGEST_LINE = 1000  # characters of an error
# often given as arguments by mistake
NAMED_BY_OPTION = ("fit", "policy", "policies", "trace", "url")


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command: its help line, what Ctrl-C leaves behind, and its module in `toolkit.cli`; '': the
    module is called like the command.
    """

    help: str
    interrupted: str = "files are written whole or not at all"
    module: str = ""


GROUPS = {
    "The workflow: each step writes a file that the next one reads": {
        "recipe": CommandEntry("make a recipe for a model and a GPU; list those that are known"),
        "profile": CommandEntry(
            "measure an engine: prefill, decode, slices, the memory edge",
            "the points measured so far are kept; the same command resumes",
        ),
        "fit": CommandEntry("fit the laws of time and memory to a profile", module="profile"),
        "tune": CommandEntry(
            "search the scheduler's settings on a trace, with the simulator",
            "finished trials are kept beside the result; the same command resumes",
        ),
        "render": CommandEntry("write the plan that `serve` starts, and files to deploy it"),
        "serve": CommandEntry(
            "start a server with OpenAI's API, N workers and one scheduler",
            "the server has stopped",
        ),
        "bench": CommandEntry("replay a trace against a server, measured beside predicted"),
        "report": CommandEntry("write an offline HTML page: fit, tuning, benches, plan"),
    },
    "Questions": {
        "simulate": CommandEntry("policies, routers and rates on a trace, without a model"),
        "capacity": CommandEntry(
            "the highest rate at which all targets hold, its cost, the GPUs",
            "nothing is kept; the same command begins anew",
        ),
        "autoscale": CommandEntry(
            "the rule that scales replicas best on a day of traffic, its cost",
            "nothing is kept; the same command begins anew",
        ),
        "doctor": CommandEntry("what this machine has and a recipe lacks", module="listings"),
        "vllm-check": CommandEntry(
            "the installed vLLM beside what llmctl knows of it", module="vllm_check"
        ),
        "recipes": CommandEntry("the recipes that ship", module="listings"),
        "policies": CommandEntry(
            "the policies: what each does, which engines run it", module="listings"
        ),
    },
    "A running server": {
        "set": CommandEntry("show or change its settings, between two passes", module="settings"),
    },
    "Traces": {
        "trace": CommandEntry("inspect, convert, generate and record traces"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class LazyGroup(TyperGroup):
    """A group that lists commands from the table, and imports a command only when it is called."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:  # type: ignore[override]
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name].help)

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        width = max(map(len, COMMANDS))
        lines = ["Usage: llmctl COMMAND [OPTIONS]", ABOUT]
        for title, group in GROUPS.items():
            lines.append(title)
            lines += [f"  {name:<{width}}  {entry.help}" for name, entry in group.items()]
        lines.append("Options: --version, --install-completion, --show-completion; COMMAND --help")
        formatter.write("\n".join(lines))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[Any, Any, list[str]]:  # type: ignore[override]
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise InputError(f"there is no command '{args[0]}'", nearest(args[0], known))
        name, listed, rest = super().resolve_command(ctx, args)
        interrupts.leaves(COMMANDS[str(name)].interrupted if name in COMMANDS else "")
        return name, listed and _load(str(name)), rest

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except BrokenPipeError as error:
            # Typer would exit silently for any broken pipe. Only that of stdout may break silently
            # (`llmctl ... | head`): the write end of a pipe without a reader polls as an error.
            stdout = select.poll()
            stdout.register(sys.stdout.fileno(), 0)
            if not stdout.poll(0):
                raise RuntimeError("a pipe other than stdout broke") from error
            raise typer.Exit(_drop_output()) from None
        except BaseException as error:  # libraries turn Ctrl-C into errors of their own
            code = interrupts.exit_code(error)
            if code is None:
                raise
            raise typer.Exit(code) from None


def _drop_output() -> int:
    """Discard the rest, since Python would report the broken pipe again at exit; the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _load(name: str) -> Any:
    """The command's function in its module, called `command` or like the command; or the module's
    typer application `app` with subcommands. None of them writes over a file that it reads.
    """
    module = importlib.import_module(f"toolkit.cli.{COMMANDS[name].module or name}")
    if hasattr(module, "app"):
        group: Any = typer.main.get_command(module.app)
        for command in group.commands.values():
            command.help = _paragraphs(command.help)
            command.callback = _keeping_inputs(command.callback)
        return group
    single = typer.Typer(add_completion=False)
    function = getattr(module, "command", None) or getattr(module, name)
    single.command(name, help=_paragraphs(function.__doc__))(function)
    made: Any = typer.main.get_command(single)
    made.callback = _keeping_inputs(made.callback)
    return made


def _keeping_inputs(callback: Callable[..., Any]) -> Callable[..., Any]:
    """The callback of a command behind a check of its files."""
    from toolkit.cli.arguments import keep_inputs

    def checked(**values: Any) -> Any:
        keep_inputs(values)
        return callback(**values)

    return checked


def _paragraphs(doc: str | None) -> str:
    """A docstring with a line per paragraph, since typer keeps line breaks."""
    return "\n\n".join(" ".join(text.split()) for text in (doc or "").split("\n\n"))


application = typer.Typer(
    cls=LazyGroup, pretty_exceptions_enable=False, invoke_without_command=True
)


@application.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """The options before a command; without any, what to do next."""
    if version:
        print(f"llmctl {toolkit.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        from toolkit.cli.first import show_first

        show_first()


def run(args: Sequence[str] | None = None) -> None:
    """Run `llmctl`; never returns. Exit codes: docs/reference/errors.md."""
    words = list(sys.argv[1:] if args is None else args)
    show_any_text()
    try:
        code = typer.main.get_command(application).main(
            words, prog_name="llmctl", standalone_mode=False
        )
        sys.stdout.flush()
    except LlmctlError as error:
        code = _report(error.message, error.hint, error.exit_code)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        message = error.format_message()
        # without a message typer has printed the help
        hint = f"see {context.command_path} --help" if context and message else ""
        options = [each.name for each in context.command.params] if context else []
        named = [f"--{name}" for name in NAMED_BY_OPTION if name in options]
        if "extra argument" in message and named:
            hint = f"write its option before it: {', '.join(named)}; {hint}"
        code = _report(message, hint, error.exit_code)
    except BrokenPipeError:
        code = _drop_output()
    except SystemExit as ended:  # rich prints tables and help, and exits with 1 on a broken pipe
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = _drop_output()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _drop_output()
        code = _report(
            f"{error.filename or 'the output'}: {error.strerror}", "free some space, and repeat", 1
        )
    sys.exit(code if isinstance(code, int) else 0)


def _report(message: str, hint: str, code: int) -> int:
    for line in message.splitlines():
        if len(line) > LONGEST_LINE:  # a value in it may be a whole file; the limit stands behind
            line = f"{line[: LONGEST_LINE // 2]}...{line[-LONGEST_LINE // 2 :]}"
        note(f"error: {line}")
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return code
