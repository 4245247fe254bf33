"""vLLM's own schedulers in a process of vLLM's Python, without an engine and without a GPU.

    with VllmDriver(python) as driver:
        print(driver.version)
        simulate(trace, policy, replace(world, paged=replace(engine, link=driver)))

Workloads without a clock are `toolkit.backends.vllm.conformance`'s.

The child (`driver_child`) says which vLLM it loaded, and `VllmDriver` compares that with the files
that it found. It takes 10 to 15 s to import vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec

from toolkit.backends.vllm.command import link_package
from toolkit.backends.vllm.messages import (
    AddRequest,
    Answered,
    CloseScheduler,
    DraftSettings,
    GivenTokens,
    GiveTokens,
    GroupSettings,
    LoadedVllm,
    Message,
    OpenScheduler,
    PlannedPass,
    PlanPass,
    SchedulerSettings,
)
from toolkit.backends.vllm.setup import PYTHON_VARIABLE
from toolkit.backends.vllm.touched import read_vllm
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import EngineError, InputError
from toolkit.sched.policies.vllm import LATER, VllmPolicy
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.drafts import DrawnDrafts
from toolkit.sim.groups.caches import CacheSettings

# A model that vLLM knows without any code of its own; only its config is read.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
}
REPLIES: dict[type, type] = {PlanPass: PlannedPass, GiveTokens: GivenTokens}
Reply = TypeVar("Reply")


KINDS: dict[str, Literal["full", "window", "chunk", "state"]] = {
    "full": "full",
    "mla": "full",
    "window": "window",
    "chunk": "chunk",
    "state": "state",
}


def _group(group: CacheGroup) -> GroupSettings:
    """A cache group as the child makes it. `InputError` for a kind that it does not make."""
    if group.kind not in KINDS:
        raise InputError(
            f"a KV cache of kind {group.spec or group.kind} is not made without a server",
            "simulate it with --scheduler model",
        )
    return GroupSettings(
        kind=KINDS[group.kind],
        block=group.block,
        window=group.window,
        mode="none" if group.mode == "none" else "align",
        checkpoint=group.checkpoints,
        draft=group.draft_group,
    )


def prepare(folder: Path) -> tuple[str, dict[str, str]]:
    """Put into `folder` what a process of vLLM's Python needs. Returns the folder of a model, and
    an environment that has llmctl's package.
    """
    link_package(folder)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    return str(model), os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class VllmDriver:
    """A child with vLLM's schedulers, and the `SchedulerLink` of a simulation to them. It ends with
    the block, and never outlives this process.

    Args:
        python: of the environment that has vLLM; None: `LLMCTL_VLLM_PYTHON`, else this one.

    Attributes:
        version: of the vLLM that the child loaded.
        on_plan: called before each pass is planned.

    Raises `EngineError` if that Python has no vLLM, or loads another version of it than it has.
    """

    def __init__(self, python: str | None = None) -> None:
        self.python = python or os.environ.get(PYTHON_VARIABLE) or sys.executable
        self._installed = read_vllm(
            self.python,
            f"name the Python of an environment that has vLLM: --vllm-python, or {PYTHON_VARIABLE}",
        )
        self._closing = contextlib.ExitStack()
        self._opened = 0  # schedulers so far
        self.version = ""
        self.on_plan: Callable[[], object] = lambda: None

    def __enter__(self) -> VllmDriver:
        with self._closing:
            folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
            self._errors = self._closing.enter_context(tempfile.TemporaryFile())
            self._start(folder)
            self._closing.callback(self._end)
            loaded = self._read(LoadedVllm)
            self.version = loaded.version
            self._installed.refuse_another(self.python, loaded.version, Path(loaded.path))
            self._closing = self._closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def ask(self, message: Message) -> Any:
        """Send a message of `toolkit.backends.vllm.messages`; its reply (`REPLIES`).

        Raises `EngineError` with the child's last line if it has ended.
        """
        try:
            self._input.write(msgspec.json.encode(message) + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._read(REPLIES.get(type(message), Answered))

    def open(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        ahead: bool,
        drafts: DrawnDrafts | None,
        caches: CacheSettings | None,
    ) -> int:
        """See `toolkit.sim.link.SchedulerLink`; so are the following."""
        longest = blocks * block_tokens + (drafts is None)  # the last token is not cached
        if not flags.chunked_prefill:
            longest = min(longest, flags.max_num_batched_tokens)
        groups = []
        retention = None
        if caches is not None:
            groups = [_group(group) for group in caches.groups]
            retention = caches.retention
            longest = caches.max_model_len
        later = {
            name: value
            for name, flag in LATER.items()
            if (value := getattr(flags, name)) != flag.default
        }
        if flags.long_prefill_token_threshold:
            later["long_prefill_token_threshold"] = flags.long_prefill_token_threshold
        of_drafts = None
        if drafts is not None:
            of_drafts = DraftSettings(method=drafts.method, tokens=drafts.tokens)
        settings = SchedulerSettings(
            block_tokens=block_tokens,
            blocks=blocks,
            max_model_len=longest,
            max_num_seqs=flags.max_num_seqs,
            max_num_batched_tokens=flags.max_num_batched_tokens,
            chunked_prefill=flags.chunked_prefill,
            prefix_caching=flags.prefix_caching,
            watermark=flags.watermark,
            ahead=ahead,
            groups=groups,
            retention=retention,
            drafts=of_drafts,
            flags=later,
        )
        self._opened += 1
        self.ask(OpenScheduler(scheduler=self._opened, settings=settings))
        return self._opened

    def add(self, scheduler: int, row: PagedRequest, tokens: Sequence[tuple[int, int]]) -> None:
        given = {"number": row.number, "prompt": row.prompt, "limit": row.limit}
        self.ask(AddRequest(scheduler=scheduler, tokens=list(tokens), **given))

    def plan(self, scheduler: int) -> PlannedPass:
        self.on_plan()
        planned: PlannedPass = self.ask(PlanPass(scheduler=scheduler))
        return planned

    def update(
        self, scheduler: int, accepted: Mapping[int, int], offered: Mapping[int, int]
    ) -> GivenTokens:
        pairs = {"accepted": list(accepted.items()), "offered": list(offered.items())}
        updated: GivenTokens = self.ask(GiveTokens(scheduler=scheduler, **pairs))
        return updated

    def close(self, scheduler: int) -> None:
        self.ask(CloseScheduler(scheduler=scheduler))

    def _start(self, folder: Path) -> None:
        model, environment = prepare(folder)
        # It has its own session: Ctrl-C is for this process. Its input ends with this process.
        self._child = subprocess.Popen(
            [self.python, "-m", "toolkit.backends.vllm.driver_child", model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._input = self._child.stdin
        self._output = self._child.stdout

    def _read(self, kind: type[Reply]) -> Reply:
        line = self._output.readline()
        if not line.endswith(b"\n"):
            raise self._died()
        return msgspec.json.decode(line, type=kind)

    def _died(self) -> EngineError:
        code = self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip()[-300:] if lines else "no output"
        return EngineError(
            f"vLLM's scheduler without an engine ended (exit code {code}): {last}",
            f"{self.python} must be the Python of an environment in which vLLM works",
        )

    def _end(self) -> None:
        self._child.kill()  # it has nothing to lose, and may still be importing vLLM
        self._child.wait()
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
