"""Which requests are served and when they come: the options that several commands share.

A command's options inherit `LengthOptions`, or `TrafficOptions` with a fixed concurrency besides.
`read_lengths` makes a trace of the first, `read_traffic` a trace and a concurrency of the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli import arguments
from toolkit.cli.arguments import option, refuse_useless
from toolkit.errors import InputError

if TYPE_CHECKING:
    from toolkit.traces.types import Trace

USUAL_TRACE = "chat-small"
LEAST_REQUESTS = 300  # by default, where lengths are given by numbers
ROUNDS = 10  # by default, so many requests for each place of a fixed concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """The options of a command that takes requests from a trace or by numbers. Their rate is an
    option of the command, since some take several.
    """

    trace: str | None = option(
        None,
        f"A trace file, or the name of a shipped trace; default: {USUAL_TRACE}.",
        autocompletion=arguments.traces,
    )
    prompt: int | None = option(
        None,
        "In place of a trace: prompts of so many tokens, with --output, and --rate or "
        "--concurrency.",
        min=1,
    )
    output: int | None = option(None, "Outputs of so many tokens, with --prompt.", min=1)
    requests: int | None = option(
        None,
        f"With --prompt: how many requests; default: {ROUNDS} times the concurrency, and at least "
        f"{LEAST_REQUESTS}.",
        min=1,
    )
    length_spread: float | None = option(
        None,
        "With --prompt: draw lengths within this share of them, as vLLM draws random ones.",
        min=0.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions(LengthOptions):
    """The same, with a fixed concurrency."""

    concurrency: int | None = option(
        None,
        "Serve so many requests at once: the next one of the trace starts when any one ends, "
        "whatever the trace's times.",
        min=1,
    )
    ramp: float | None = option(
        None, "With --concurrency: start the first requests over these seconds.", min=0.0
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests, and how they come.

    Attributes:
        trace: the requests; at a fixed concurrency their order counts, not their times.
        concurrency: so many at once; 0: they come at their times.
        ramp_s: the first ones start spread over these seconds.
        path: the trace's file; None: the lengths were given by numbers, and must not be scaled.
    """

    trace: Trace
    concurrency: int = 0
    ramp_s: float = 0.0
    path: Path | None = None

    def inputs(self) -> dict[str, Path]:
        """The file that it was made from, if any, by its role."""
        return {} if self.path is None else {"trace": self.path}

    def refuse_longer(self, context: int | None, output: int | None = None) -> None:
        """`InputError` where the longest prompt and output together exceed the model's `context`,
        or an output exceeds a server's limit. None: it is not known.
        """
        trace = self.trace
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        if context is not None and longest > context:
            raise InputError(
                f"{trace.source}: the longest has {longest:,} tokens; the model's context is "
                f"{context:,}",
                "give a shorter --prompt or --output",
            )
        most = int(trace.output_tokens.max())
        if output is not None and most > output:
            raise InputError(
                f"{trace.source}: the longest output has {most:,} tokens; the server's limit is "
                f"{output:,}",
                "give a shorter --output, or another limit with --max-new-tokens",
            )


def read_traffic(options: TrafficOptions, rate: object, *, seed: int) -> Traffic:
    """The requests that the options describe, with lengths as they are read or given.

    Args:
        rate: the command's --rate, to which it scales the trace; None: it has none.
        seed: of drawn lengths and arrivals.

    Raises `InputError` where options contradict each other, and for a trace that cannot be read.
    """
    concurrency = options.concurrency or 0
    if concurrency and rate is not None:
        raise InputError(
            f"--concurrency {concurrency} starts a request when one ends, so there is no --rate",
            "leave one of the two out",
        )
    if not concurrency:
        refuse_useless({"--ramp": options.ramp}, "there is no --concurrency")
    ramp_s = options.ramp or 0.0
    by_numbers = options.prompt is not None and options.output is not None
    if by_numbers and not concurrency and rate is None:
        raise InputError(
            "--prompt and --output do not say when requests come",
            "add --concurrency REQUESTS or --rate REQUESTS_PER_S",
        )
    least = max(ROUNDS * concurrency, LEAST_REQUESTS)
    trace, path = read_lengths(options, usual=USUAL_TRACE, seed=seed, requests=least)
    if path and concurrency:
        trace = _unordered(trace)
    return Traffic(trace, concurrency, ramp_s, path)


def read_lengths(
    options: LengthOptions, *, usual: str, requests: int, seed: int = 0
) -> tuple[Trace, Path | None]:
    """The trace that the options name and its file, or requests by numbers, without a file. These
    arrive in a Poisson process of one per second.

    Args:
        usual: the trace without any of the options.
        seed: of drawn lengths and arrivals.
        requests: how many, where they are given by numbers and --requests is not.

    Raises `InputError` where options contradict each other, and for a trace that cannot be read.
    """
    from toolkit.traces.generate import fixed_lengths
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    if options.prompt is None and options.output is None:
        of_lengths = {"--requests": options.requests, "--length-spread": options.length_spread}
        refuse_useless(of_lengths, "there is no --prompt and no --output")
        path = trace_path(options.trace or usual)
        trace, _ = read_trace(path)
        return trace, path
    if options.prompt is None or options.output is None:
        given = "--prompt"
        lacking = "--output"
        if options.prompt is None:
            given, lacking = lacking, given
        raise InputError(f"{given} is given without {lacking}", f"add {lacking} TOKENS")
    if options.trace is not None:
        raise InputError(
            f"--trace {options.trace} has lengths of its own, and --prompt and --output are given",
            "leave the trace or the lengths out",
        )
    count = options.requests or requests
    spread = options.length_spread or 0.0
    return fixed_lengths(options.prompt, options.output, count, spread=spread, seed=seed), None


def _unordered(trace: Trace) -> Trace:
    """The trace without its sessions, which a fixed concurrency does not keep."""
    from dataclasses import replace

    if trace.sessions is None:
        return trace
    later = int((trace.sessions.previous >= 0).sum())
    note = (
        f"a fixed concurrency keeps no sessions: {later:,} later turns start when a place is free"
    )
    return replace(trace, sessions=None, notes=(*trace.notes, note))
