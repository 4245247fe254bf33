"""vLLM as a backend: profile it through its own server, start it with a plan, check its version.

Clients talk to vLLM's own server directly. llmctl reports when vLLM is ready, forwards signals and
waits for its end. A policy of ours runs inside vLLM (`toolkit.backends.vllm.scheduler`). In any
case `toolkit.backends.vllm.iterations` compares its passes with the plan's laws, in its /metrics.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

import toolkit
from toolkit import interrupts
from toolkit.backends import Check, ServerCommand
from toolkit.backends.vllm import alive
from toolkit.backends.vllm.child import SHUTDOWN
from toolkit.backends.vllm.command import (
    DRAFTS,
    NO_TELEMETRY,
    POLICY,
    VllmCommand,
    VllmServer,
    draft_flags,
    flags_of,
    free_port,
    grouped,
    vllm_beside,
    vllm_python,
    vllm_server,
    vllm_version,
)
from toolkit.backends.vllm.conformance.results import agreement
from toolkit.backends.vllm.control import MIDDLEWARE
from toolkit.backends.vllm.setup import (
    CONTROL_VARIABLE,
    EVENT_LOG_VARIABLE,
    ITERATIONS_VARIABLE,
    PLAN_VARIABLE,
    PYTHON_VARIABLE,
)
from toolkit.backends.vllm.touched import (
    CAPABILITIES,
    REQUIREMENT,
    TOUCHED,
    Installed,
    check,
    read_vllm,
    refuse_missing,
)
from toolkit.engines.resources import (
    GPUS_VARIABLE,
    require_gpu,
    share_gpus,
    visible_gpus,
)
from toolkit.engines.saved import saved_model
from toolkit.errors import EngineError, InputError, LlmctlError
from toolkit.files.io import processor, write_file
from toolkit.files.modelled import refuse_fit, refuse_recipe
from toolkit.files.plan import Plan
from toolkit.files.profile import refuse_foreign
from toolkit.files.recipe import Recipe
from toolkit.profiling.process import ProfileBench
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import declared, parameters
from toolkit.sched.policies.vllm import FLAGS, ROWS, TOKENS, VllmPolicy
from toolkit.server.process import END_SIGNALS, check_exposure, listen
from toolkit.sim.drafts import rates_of

if TYPE_CHECKING:
    from toolkit.server.options import ServerOptions

POLICY_SCHEDULER = "toolkit.backends.vllm.scheduler.LlmctlScheduler"
COUNTING_SCHEDULER = "toolkit.backends.vllm.iterations.counted_scheduler"
# vLLM's own images, by the device that they are for. A tag of a release is not moved.
IMAGES = {
    "cuda": "vllm/vllm-openai:v0.32.0",
    "cpu": "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0",
}
REMEDY = f"pip install '{REQUIREMENT}' into it, or name another Python in {PYTHON_VARIABLE}"
NEEDED = "mypy-extensions"  # of llmctl's code inside vLLM, and not in vLLM's environment
METRICS_FOLDER = "metrics"  # vLLM's processes share their metrics through files
ENDED_METRIC = "vllm:request_success"
REASON_LABEL = "finished_reason"
AT_LIMIT = "length"  # the reason of a request that has all its tokens
POLL_EVERY_S = 0.2
ASK_EVERY_S = 5.0  # whether it is healthy


class VllmBackend:
    """`toolkit.backends.Backend`, `Serves` and `StartsReplicas` of vLLM."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        from toolkit.backends.vllm.profile import vllm_bench  # here: only a profile needs httpx

        return vllm_bench(recipe)

    def launch(
        self, plan: Plan, options: ServerOptions, on_ready: Callable[[str], None]
    ) -> Mapping[str, int]:
        """See `Serves.launch`: vLLM's own server as a child process, with exactly the plan's flags.

        Raises `InputError` for an address that cannot be used, an untested version of vLLM, or a
        plan that was fitted on another CPU or version, and `EngineError` if vLLM is not installed,
        cannot load, or ends by itself.
        """
        require_gpu(plan.recipe)
        check_exposure(options.host, asks_key=options.asks_key, insecure=options.insecure)
        _refuse_other(plan, options)
        # Report a bad address before anything slow; vLLM takes the port later.
        with listen(options.host, options.port) as probe:
            port = probe.getsockname()[1]
        asked = 0
        with tempfile.TemporaryDirectory(prefix="llmctl-plan-") as folder:
            with contextlib.suppress(EndRequested), _Signals() as signals:
                command = command_of(plan, options, Path(folder))
                with vllm_server(command, options.host, port, quiet=False) as server:
                    signals.loading = False
                    if not signals.count:
                        if options.control_key:
                            options.say(live_cost(plan, alive.blocks(server.url)))
                        on_ready(server.url)
                        with EngineWatch(plan, options, server.url) as watch:
                            _serve(server, plan, options, signals, watch)
                        asked = watch.asked
            ended = _count_ended(Path(folder) / METRICS_FOLDER)
            if asked:
                ended[AT_LIMIT] = max(ended.get(AT_LIMIT, 0) - asked, 0)
            return ended

    def replica(self, plan: Plan, options: ServerOptions, number: int, folder: Path) -> VllmServer:
        """See `StartsReplicas.replica`. Raises `InputError` for a plan that was
        fitted on another CPU or version of vLLM, and `EngineError` for too few GPUs or CPUs.
        """
        require_gpu(plan.recipe)
        _refuse_other(plan, options)
        for part in ("plan", "server"):
            (folder / part).mkdir()
        command = _with_share(command_of(plan, options, folder / "plan"), plan, number)
        port = free_port(options.host)
        return VllmServer(command, options.host, port, quiet=False, folder=folder / "server")

    def check(self, recipe: Recipe) -> list[Check]:
        """A recipe is data: a Python that it names is looked at and not run."""
        python = vllm_python(recipe)
        found: Installed | None
        try:
            if python in (os.environ.get(PYTHON_VARIABLE), sys.executable):
                found = read_vllm(python, REMEDY)
                return [Check("engine", "ok", f"vLLM {found.version}, of {python}"), *_has(found)]
            found = vllm_beside(Path(python))
            if found:
                text = f"vLLM {found.version}, beside {python}"
                return [Check("engine", "ok", text), *_has(found)]
        except LlmctlError as error:
            return [Check("engine", "missing", error.message, error.hint)]
        if not os.access(python, os.X_OK) or not Path(python).is_file():
            text = f"{python}: no program, and the recipe names it"
            return [Check("engine", "missing", text, f"engine.vllm.python, or {PYTHON_VARIABLE}")]
        text = f"the recipe names {python}: no vLLM lies beside it, and it is not run here"
        remedy = "llmctl profile and llmctl serve run it, and say more"
        return [Check("engine", "note", text, remedy)]

    def described(self, plan: Plan, served_model: str) -> ServerCommand:
        """See `StartsReplicas.described`: in vLLM's own image, which counts no passes, or in one
        that has llmctl, too.
        """
        recipe = plan.recipe
        policy = plan.settings.policy
        command = VllmCommand(recipe, recipe.model.source, served_model)
        scheduling = grouped(scheduler_flags(plan, counted=False))
        ours = policy != POLICY
        image = IMAGES[recipe.hardware.device]
        source = "vLLM's own, of the version that was tried; it was not pulled here"
        if ours:
            lines = [f"FROM {image}", "COPY toolkit /opt/llmctl/toolkit"]
            lines += ["ENV PYTHONPATH=/opt/llmctl", f"RUN pip install --no-cache-dir {NEEDED}", ""]
            written = "\\n".join(lines)
            image = f"llmctl-vllm:{toolkit.__version__}"
            build = f"printf '{written}' | docker build -t {image} -f - ."
            source = f"the policy runs inside vLLM; build it in a checkout: {build}"
        return ServerCommand(
            command=["vllm", "serve", recipe.model.source],
            flags=[
                *((flag, f"recipe: {key}") for flag, key in command.settings()),
                *((flag, f"plan: policy '{policy}'") for flag in scheduling),
            ],
            environment=NO_TELEMETRY | (recipe.engine.vllm.env if recipe.engine.vllm else {}),
            drain=SHUTDOWN,
            health="/health",
            image=image,
            image_source=source,
            plan_variable=PLAN_VARIABLE if ours else "",
            python_variable=command.python_variable,
            alive=Path(alive.__file__).read_text(encoding="utf-8"),
        )


def _has(installed: Installed) -> list[Check]:
    """What of all that llmctl touches inside vLLM a version has: a line for each capability, and
    one for each item that is missing. `InputError` for an unknown release without files here.
    """
    if installed.folder is None:
        refuse_missing(installed, "start")
        return []
    missing = check(installed)
    checks = []
    for need, capability in CAPABILITIES.items():
        lacks = [one for one in missing if need in one.item.needs]
        count = sum(need in item.needs for item in TOUCHED)
        name = f"vllm: {need}"
        status: Literal["missing", "note"] = "missing" if need == "start" else "note"
        text = f"{capability.what}: all {count} items of vLLM that it needs are there"
        if need == "simulation":
            text = f"{text}; {agreement(installed.version)}"
        if not lacks:
            checks.append(Check(name, "ok", text))
        checks += [
            Check(name, status, f"{one.item.words}: {one.why}", capability.without) for one in lacks
        ]
    return checks


def _with_share(command: VllmCommand, plan: Plan, number: int) -> VllmCommand:
    """The command of server `number` with its share of this machine's devices, which all servers of
    the plan divide. Raises `EngineError` if there are too few.
    """
    engine = plan.recipe.engine
    on_cpu = plan.recipe.hardware.device == "cpu"
    threads = engine.threads or 0 if on_cpu else 0
    variables = dict(command.variables)
    if not on_cpu:
        shares = share_gpus(plan.workers, engine.tensor_parallel_size, visible_gpus())
        names = shares[number].names
        if names is not None:
            variables[GPUS_VARIABLE] = names
    own = range(number * threads, (number + 1) * threads)
    used = range(plan.workers * threads)
    command = replace(command, variables=variables, own_cpus=own, used_cpus=used)
    if len(command.cpus[0]) < threads:
        raise EngineError(
            f"{plan.workers} servers of {threads} threads need {len(used)} CPUs, and this machine "
            f"has {len(os.sched_getaffinity(0))}",
            "start fewer with --workers, or set fewer engine.threads in the recipe",
        )
    return command


class EndRequested(BaseException):
    """A signal came while the server loads. No `Exception`: imports of libraries would catch it."""


def _refuse_other(plan: Plan, options: ServerOptions) -> None:
    """Refuse a plan of what is not modelled, and of another engine or CPU, as far as all is known
    before loading.
    """
    refuse_recipe(plan.recipe)
    refuse_fit(plan.fit)
    version = vllm_version(plan.recipe).partition("+")[0]  # vLLM omits a build's local one
    identity = {"engine": f"vllm {version}"}
    if plan.recipe.hardware.device == "cpu":
        identity["device"] = f"CPU {processor()}"
    refuse_foreign(plan.fit.engine, [identity], options.on_foreign)


def command_of(plan: Plan, options: ServerOptions, folder: Path) -> VllmCommand:
    """The command that starts vLLM. `folder` gets the plan, for our code inside, and metrics."""
    policy = plan.settings.policy
    path = folder / "plan.json"
    metrics = folder / METRICS_FOLDER
    metrics.mkdir()
    write_file(plan, path)
    flags = scheduler_flags(plan, counted=plan.fit.steps is not None)
    variables = {PLAN_VARIABLE: str(path), "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    if options.api_key:
        variables["VLLM_API_KEY"] = options.api_key
    if options.control_key:
        if plan.fit.steps is None:
            raise InputError(
                "--live: the fit has no law of passes, and only their scheduler takes new settings",
                "profile engine vllm again; then: llmctl fit, render",
            )
        variables[CONTROL_VARIABLE] = options.control_key
        flags += [*wider(plan), "--middleware", MIDDLEWARE]
    if policy != POLICY and options.event_log is not None:
        variables[EVENT_LOG_VARIABLE] = str(options.event_log.absolute())
    if options.pass_log is not None:
        if plan.fit.steps is None:
            raise InputError(
                "--pass-log: the fit has no law of passes, which logs them",
                "profile engine vllm again; then: llmctl fit, render",
            )
        variables[ITERATIONS_VARIABLE] = str(options.pass_log.absolute())
    flags += ["--shutdown-timeout", str(round(options.timeout_s))]
    model = saved_model(plan.recipe.model, plan.recipe.hardware)
    return VllmCommand(plan.recipe, model, options.model, flags, variables)


def wide_values(plan: Plan) -> dict[str, int]:
    """The most requests and tokens of a pass that a live server can be given later: the search's
    bounds, or the plan's values where these are larger. The server begins with the plan's.
    """
    if plan.settings.policy != POLICY:
        return {}
    known = declared(VllmPolicy)
    values = parameters(make_any(POLICY, plan.settings.parameters))
    space = plan.recipe.tune.space
    found = {}
    for name in [name for name, flag in FLAGS.items() if flag.buffers]:
        usual = known[name].search or (0, 0)
        wide = max(float(high) for high in space.get(name, usual))
        found[name] = max(int(wide), int(values[name]))
    found[TOKENS] = max(found[TOKENS], found[ROWS])
    return found


def wider(plan: Plan) -> list[str]:
    """The flags of `wide_values`. vLLM takes the last of two equal flags."""
    words: list[str] = []
    for name, value in wide_values(plan).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def scheduler_flags(plan: Plan, *, counted: bool) -> list[str]:
    """The scheduler's flags: vLLM's own, or ours inside it. `counted`: its passes are counted."""
    policy = plan.settings.policy
    values = plan.settings.parameters
    flags = flags_of(policy, values)
    if policy == POLICY:
        flags += draft_flags(plan.recipe, values, _synthetic_rates(plan))
    if counted:
        flags += ["--scheduler-cls", COUNTING_SCHEDULER]
    elif policy != POLICY:
        flags += ["--scheduler-cls", POLICY_SCHEDULER]
    if policy == "mlfq":
        flags += ["--no-async-scheduling"]
    return flags


def _synthetic_rates(plan: Plan) -> Sequence[float]:
    """The rates at which vLLM is to accept drafts, whatever they are; none where it decides."""
    acceptance = plan.recipe.serve.acceptance
    tokens = int(plan.settings.parameters.get(DRAFTS, 0))
    if acceptance is None or not acceptance.synthetic or not tokens:
        return []
    return rates_of(acceptance, tokens)


def live_cost(plan: Plan, blocks: int) -> str:
    """What a live server may be given, and what this start costs in blocks of KV cache; `blocks`:
    the number that it has (0: not known).
    """
    values = plan.settings.parameters
    words = [
        f"{name} up to {wide:,} (the plan: {values.get(name, 'default')})"
        for name, wide in wide_values(plan).items()
    ]
    text = f"live: {'; '.join(words)}" if words else "live: its policy's parameters"
    steps = plan.fit.steps
    if not blocks or steps is None:
        return text
    cost = steps.blocks - (blocks - 1)  # vLLM never gives out one
    if cost <= 0:
        return f"{text}; it costs no block of KV cache"
    share = 100.0 * cost / steps.blocks
    return f"{text}; it costs {cost:,} of {steps.blocks:,} blocks of KV cache ({share:.1f} %)"


def _count_ended(metrics: Path) -> dict[str, int]:
    """The number of ended requests by vLLM's finish reasons, from the files that vLLM leaves."""
    if not metrics.is_dir():  # a signal came before the server
        return {}
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(metrics))
    ended: Counter[str] = Counter()
    for family in registry.collect():
        if family.name == ENDED_METRIC:
            for sample in family.samples:
                ended[sample.labels.get(REASON_LABEL, "")] += int(sample.value)
    return dict(ended)


class _Signals:
    """Counts signals. The first one while the server loads raises `EndRequested`."""

    def __init__(self) -> None:
        self.count = 0
        self.loading = True

    def __enter__(self) -> _Signals:
        self._before = {number: signal.signal(number, self) for number in END_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if number == signal.SIGINT:
            interrupts.note()
        if self.loading and self.count == 1:
            raise EndRequested


class EngineWatch:
    """A thread that notices when the engine hangs while its server answers /health: the engine's
    figures stand still for `serve.hang_s`, and it generates no token for as long.

    Attributes:
        asked: requests for a token, which it answered.
        hangs: why the server must end; '' while it is alive.
    """

    def __init__(self, plan: Plan, options: ServerOptions, url: str) -> None:
        self.asked = 0
        self.hangs = ""
        self._url = url
        self._plan = plan
        self._options = options
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> EngineWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()  # it may still wait for a token: it ends with the process

    def _watch(self) -> None:
        options = self._options
        url = self._url
        now_s = time.monotonic
        limit_s = self._plan.recipe.serve.hang_s
        seen = ""
        since_s = now_s()
        while not self._ended.wait(min(ASK_EVERY_S, limit_s / 2)):
            figures = alive.figures(url)
            if figures and figures != seen:
                seen = figures
                since_s = now_s()
            elif now_s() - since_s > limit_s:
                if alive.generates(url, options.model, limit_s, options.api_key):
                    self.asked += 1
                elif alive.figures(url) in ("", seen):
                    self.hangs = f"vLLM generated no token for {limit_s:g} s when asked"
                    return
                seen = alive.figures(url)
                since_s = now_s()


def _serve(
    server: VllmServer,
    plan: Plan,
    options: ServerOptions,
    signals: _Signals,
    watch: EngineWatch,
) -> None:
    """Wait for a signal, then for vLLM to finish running requests, within the options' notice and
    timeout or until a second signal. Raises `EngineError` if vLLM ends, does not answer for
    `hang_s` seconds, or hangs: the service manager starts it again.
    """
    now_s = time.monotonic
    hang_s = plan.recipe.serve.hang_s
    answered_s = now_s()
    asked_s = -math.inf
    while not signals.count:
        if server.wait(POLL_EVERY_S) is not None:
            raise server.died("while it served")
        why = watch.hangs
        if now_s() - asked_s >= ASK_EVERY_S:
            if server.healthy():
                answered_s = now_s()
            elif now_s() - answered_s > hang_s:
                why = f"vLLM did not answer /health for {hang_s:g} s"
            asked_s = now_s()
        if why:
            server.kill()
            raise EngineError(f"{why} (serve.hang_s)", "its own output says more")
    notice_end_s = now_s() + options.notice_s
    while signals.count < 2 and now_s() < notice_end_s:
        time.sleep(min(POLL_EVERY_S, options.notice_s))
    server.terminate()
    deadline_s = now_s() + options.timeout_s
    while signals.count < 2 and now_s() < deadline_s and server.wait(POLL_EVERY_S) is None:
        pass
