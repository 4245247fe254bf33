"""`llmctl trace`: inspect, convert, generate and record workloads. Lengths and times only, no text.

`record` is a reverse proxy in front of any OpenAI-compatible server; the other subcommands read and
write files.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import (
    JsonOptions,
    argument,
    command_of,
    option,
    refuse_useless,
)
from toolkit.cli.output import WIDTH, emit, note, table
from toolkit.errors import InputError
from toolkit.files.shipped import load_recipe
from toolkit.report.parts import Cell
from toolkit.units import number, seconds

if TYPE_CHECKING:
    from toolkit.traces.chats import TokenCounter
    from toolkit.traces.generate import DrawnLengths, SharedContent
    from toolkit.traces.read import ReadReport
    from toolkit.traces.types import Trace
    from toolkit.traces.windows import Description


RECORDED_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class RecordOptions(JsonOptions):
    upstream: Annotated[str, typer.Option(metavar="URL", help="URL of the server to record.")]
    out: Annotated[
        Path,
        typer.Option(
            help="Write the trace to this file, canonical JSONL; an existing file is continued."
        ),
    ]
    host: str = option("127.0.0.1", "Listen on this address for clients.")
    port: int = option(
        8100, "Listen on this port for clients; 0 takes a free one.", min=0, max=65535
    )
    insecure: bool = option(False, "Accept other machines.")
    block_tokens: int = option(
        16,
        "Note what prompts share, as keyed hashes of blocks of this number of tokens; 0: do not.",
        min=0,
    )


@command_of(RecordOptions)
def record(args: RecordOptions) -> None:
    """Record a trace in front of a running server: lengths and times, and what prompts share, never
    text or keys.

    Clients send their requests to --host and --port instead of the server. Streams are passed on as
    they arrive. Tokens are counted by the server's own usage report: the recorder requests it where
    a client did not, and removes it from that client's answer. The server's key is taken from
    LLMCTL_ENGINE_API_KEY, and clients give the same one. At 256 MiB OUT becomes OUT.1, in place of
    an older one. After SIGTERM or Ctrl-C, running requests have 30 s to end.
    """
    from toolkit.backends.openai import KEY_VARIABLE
    from toolkit.server.options import ServerOptions, one_key
    from toolkit.server.pool import recording_backend
    from toolkit.server.server import Server
    from toolkit.server.watched import given_replicas

    def announce(url: str) -> None:
        emit(
            args.as_json,
            {"url": url, "upstream": args.upstream, "out": str(args.out)},
            lambda: print(f"recording: {url} to {args.out}"),
        )
        sys.stdout.flush()

    key = os.environ.get(KEY_VARIABLE, "")
    options = ServerOptions(
        host=args.host,
        port=args.port,
        keys=one_key(key),
        insecure=args.insecure,
        replicas=given_replicas([args.upstream]),
        replica_key=key,
        request_log=args.out,
        max_body_bytes=RECORDED_BODY_BYTES,
        block_tokens=args.block_tokens,
        say=note,
    )
    with Server.open(options, recording_backend(options)) as server:
        ended = server.run(announce)
    if not ended:
        note("no client requested tokens; nothing was recorded")
        return
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(ended.items()))
    note(f"requests: {counts}; see them with: llmctl trace inspect {args.out}")


app = typer.Typer(
    help="Inspect, convert, generate and record traces.", no_args_is_help=True, add_completion=False
)
app.command("record")(record)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(JsonOptions):
    """The options of a command that reads a trace in any known format."""

    trace: str = argument(
        "A trace or a log, or the name of a shipped trace.",
        metavar="TRACE",
        autocompletion=arguments.traces,
    )
    columns: str | None = option(
        None,
        "The columns of a log, like time=ts:ms,session=conv; others are "
        "found by their names. Roles: time, end, duration (each with a unit: s, ms, us, ns, iso), "
        "prompt, output, session, max_tokens, priority, status.",
        metavar="ROLE=NAME,...",
    )
    tokenizer: str | None = option(
        None,
        "Count the tokens of conversations with the tokenizer of a recipe's model, or with a "
        "tokenizer.json.",
        metavar="RECIPE|FILE",
        autocompletion=arguments.recipes,
    )


@app.command("inspect")
@command_of(ReadOptions)
def inspect(args: ReadOptions) -> None:
    """Show the contents of a trace: what was understood, rows kept and dropped, duration, rate,
    burstiness, lengths, and what a prefix cache could reuse.
    """
    from toolkit.traces.windows import describe

    loaded, report = _read(args)
    found = describe(loaded)
    emit(
        args.as_json,
        {"report": report, **asdict(found)},
        lambda: _show(loaded, report, found),
    )


def _read(args: ReadOptions) -> tuple[Trace, ReadReport]:
    """Return the trace and the report. Raises `InputError` if an option has no effect."""
    from toolkit.traces.columns import parse_columns
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    named = None if args.columns is None else parse_columns(args.columns)
    path = trace_path(args.trace)
    counter = None if args.tokenizer is None else _tokenizer(args.tokenizer)
    loaded, report = read_trace(path, named, counter)
    if not report.text:
        refuse_useless({"--tokenizer": args.tokenizer}, f"{path.name} has lengths in tokens")
    return loaded, report


def _tokenizer(name: str) -> TokenCounter:
    """A counter with the tokenizer of a recipe's model, or with a tokenizer.json."""
    from toolkit.engines.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
    from toolkit.files.shipped import recipe_path
    from toolkit.traces.chats import TokenCounter

    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise InputError(f"--tokenizer {name}: no such file", "name a tokenizer.json")
        tokenizer: Tokenizer = FileTokenizer(path)
        said = f"those of {path.name}"
    else:
        recipe = load_recipe(recipe_path(Path(name)))
        tokenizer = load_tokenizer(recipe.model)
        said = f"those of the tokenizer of recipe {recipe.name}"
    return TokenCounter(lambda text: len(tokenizer.encode(text, special=False)), said)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(ReadOptions):
    out: Path = argument("Write the trace to this file, canonical JSONL.", metavar="OUT")
    start: float = option(
        0.0, "Leave out requests that arrive before this second (after scaling).", min=0.0
    )
    duration: float | None = option(None, "Keep this many seconds from --start on.", min=0.0)
    rate: float | None = option(None, "Scale arrival times to this mean rate, requests/s.")
    draw_rate: float | None = option(
        None, "Draw new arrival times at this rate (Poisson), for traces without times."
    )
    grow: list[str] | None = option(
        None,
        "Add requests in these hours, such as 9-17=1.5: of the day, or without dates since the "
        "start; repeatable.",
        metavar="HOURS=FACTOR",
    )
    seed: int | None = option(
        None,
        "With --draw-rate, --grow and --repeat: draw from this seed; the same seed gives the same "
        "trace; default: 0.",
        min=0,
    )
    repeat: int = option(
        1,
        "Repeat the trace so often, end to end, as `capacity` does with a short one: with other "
        "requests at its own times, and with sessions and contents of their own.",
        min=1,
    )


@app.command("convert")
@command_of(ConvertOptions)
def convert(args: ConvertOptions) -> None:
    """Write a trace or a log as canonical JSONL, cut and scaled as requested.

    Requests of --grow are added first, by the hours of the file. The cut comes last, so its seconds
    are seconds of the scaled trace, like in `tune` and `bench`.
    """
    from toolkit.traces.generate import Arrivals, draw_arrivals
    from toolkit.traces.growth import Growth, grown
    from toolkit.traces.repeat import repeated
    from toolkit.traces.windows import excerpt, scale_rate

    if args.rate is not None and args.draw_rate is not None:
        raise InputError(
            f"--rate {args.rate:g} and --draw-rate {args.draw_rate:g} contradict each other",
            "give one of them",
        )
    growths = [Growth.parsed(words) for words in args.grow or []]
    if args.draw_rate is None and not growths and args.repeat == 1:
        refuse_useless({"--seed": args.seed}, "nothing is drawn")
    seed = args.seed or 0
    loaded, report = _read(args)
    added = None
    if args.draw_rate is not None:
        loaded = draw_arrivals(loaded, Arrivals(args.draw_rate, 1.0), seed)
    if growths:
        clock_s = report.clock_s if args.draw_rate is None else None
        loaded, added = grown(loaded, growths, clock_s, seed)
    if args.rate is not None:
        loaded = scale_rate(loaded, args.rate)
    loaded = repeated(loaded, args.repeat, seed)
    loaded = excerpt(loaded, args.start, args.duration)
    _put(loaded, args.out, args.as_json, added)


def _put(trace: Trace, out: Path, as_json: bool, added: int | None = None) -> None:
    """Write a trace; say how many requests it has, how many were added if any, and its notes."""
    from toolkit.traces.write import write_trace

    write_trace(trace, out)
    summary = {"out": str(out), "requests": len(trace), "notes": list(trace.notes)}
    if added is not None:
        summary["added"] = added
    emit(as_json, summary, lambda: print(f"wrote {len(trace):,} requests to {out}"))
    if not as_json:
        for line in trace.notes:
            note(f"  {line}")


PROMPT = "lognormal:400:1"
OUTPUT = "lognormal:120:0.75"
RATE_RPS = 20.0
DURATION_S = 600.0
TEMPLATE_TOKENS = 512


_shared = partial(option, rich_help_panel="What prompts share")


@dataclass(frozen=True, slots=True)
class GenerateOptions(JsonOptions):
    out: Annotated[Path, typer.Option(help="Write the trace to this file, canonical JSONL.")]
    rate: float | None = option(None, f"Mean arrival rate, requests/s; default: {RATE_RPS:g}.")
    duration: float | None = option(None, f"Seconds; default: {DURATION_S:g}.")
    cv: float | None = option(
        None,
        "Coefficient of variation of the gaps; above 1 is bursty; 1: Poisson; default: 1.",
    )
    prompt: str | None = option(
        None,
        "lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH, pareto:LOW:ALPHA or fixed:TOKENS; default: "
        f"{PROMPT}.",
    )
    output: str | None = option(None, f"The same for output lengths; default: {OUTPUT}.")
    metrics: Path | None = option(
        None,
        "Draw lengths as in the histograms of this page, saved from /metrics of a vLLM server.",
    )
    longest: int | None = option(
        None, "Clip lengths to this many tokens, and say how many; default: clip none.", min=1
    )
    all_at_once: int | None = option(
        None,
        "This many requests, all at 0 s, instead of --rate and --duration.",
        "--backlog",
        min=1,
    )
    system_tokens: int | None = _shared(
        None, "Begin every prompt with this number of tokens, the same for all.", min=1
    )
    templates: int | None = _shared(
        None,
        f"Begin prompts with one of this many templates of {TEMPLATE_TOKENS} tokens; the k-th has "
        "a weight of 1/k.",
        min=1,
    )
    seed: int = option(0, "Draw from this seed; the same seed gives the same trace.", min=0)


@app.command("generate")
@command_of(GenerateOptions)
def generate(args: GenerateOptions) -> None:
    """Write a synthetic trace. The defaults and `--longest 1024` are the SCLS paper's setting, as
    far as it is known.
    """
    from toolkit.traces.generate import Arrivals, backlog
    from toolkit.traces.generate import generate as synthesize
    from toolkit.traces.histograms import UNKNOWN

    prompts, outputs = _lengths(args)
    content = _content(args)
    if args.all_at_once is not None:
        refuse_useless(
            {"--rate": args.rate, "--duration": args.duration, "--cv": args.cv},
            f"all {args.all_at_once:,} requests of --backlog arrive at 0 s",
        )
        made = backlog(args.all_at_once, prompts, outputs, args.seed, content)
    else:
        arrivals = Arrivals(
            RATE_RPS if args.rate is None else args.rate, 1.0 if args.cv is None else args.cv
        )
        duration_s = DURATION_S if args.duration is None else args.duration
        made = synthesize(arrivals, duration_s, prompts, outputs, args.seed, content)
    if args.metrics:
        made = replace(made, notes=(*made.notes, UNKNOWN))
    _put(made, args.out, args.as_json)


def _lengths(args: GenerateOptions) -> tuple[DrawnLengths, DrawnLengths]:
    """Return the lengths of prompts and outputs. Raises `InputError` if an option has no effect."""
    from toolkit.traces.generate import parse_lengths
    from toolkit.traces.types import MAX_LENGTH

    longest = args.longest or MAX_LENGTH
    if args.metrics:
        refuse_useless(
            {"--prompt": args.prompt, "--output": args.output}, "--metrics has the lengths"
        )
        return _page_lengths(args.metrics, longest)
    return (
        parse_lengths(args.prompt or PROMPT, longest),
        parse_lengths(args.output or OUTPUT, longest),
    )


def _page_lengths(path: Path, longest: int) -> tuple[DrawnLengths, DrawnLengths]:
    """Return the lengths that a saved page of metrics counts."""
    from toolkit.endpoints.target import page_metrics
    from toolkit.files.strict import read_bytes
    from toolkit.traces.histograms import lengths_of

    metrics = page_metrics(read_bytes(path, "save it with curl"), path.name)
    return lengths_of(metrics, longest, path.name)


def _content(args: GenerateOptions) -> SharedContent | None:
    """Return what generated prompts share; None: nothing."""
    from toolkit.traces.generate import SharedContent

    if not (args.system_tokens or args.templates):
        return None
    return SharedContent(args.system_tokens or 0, args.templates or 0)


def _show(trace: Trace, report: ReadReport, found: Description) -> None:
    """Print what a trace contains."""
    print(trace.source)
    print(f"  {trace.notes[0]}")
    if report.understood:
        print(fill(report.understood, WIDTH, initial_indent="  ", subsequent_indent="    "))
    for line in trace.notes[1:]:
        if line != report.understood:
            print(f"  {line}")
    print(
        f"  {seconds(found.duration_s)}, {number(found.rate_rps)} requests/s, "
        f"gaps with a variation (CV) of {number(found.burstiness_cv)} (Poisson: 1)\n"
        f"  {number(found.input_tokens_per_s)} prompt and"
        f" {number(found.output_tokens_per_s)} output tokens/s"
    )
    columns = ["tokens", *(f">{name}" for name in ("mean", *found.prompt.percentiles, "max"))]
    spreads = {"prompt": found.prompt, "output": found.output}
    rows: list[list[Cell]] = [
        [name, *map(round, (s.mean, *s.percentiles.values(), s.max))] for name, s in spreads.items()
    ]
    table(columns, rows)
    if found.reusable_percent is not None:
        share = f"{found.reusable_percent:.1f} % of the prompt tokens"
        print(f"{share} repeat the beginning of an earlier prompt")
