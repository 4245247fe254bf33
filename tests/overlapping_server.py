"""A server with overlapping passes of known times: what vLLM's loop does, pass by pass.

Written from vLLM's `step_with_batch_queue`, not from the equations of the law, to check them.
"""

import numpy as np
from synthetic_profiles import steps_profile

from toolkit.estimators.part_fits import point_of
from toolkit.files.profile import StepsProfile
from toolkit.laws.features import GRAPH, StepShape, chunk_attended
from toolkit.laws.passes import PassLaw

SETTLING_S = 1e-6  # of a pass's tokens: no pass takes no time

Run = list[StepShape]  # the passes from one idle moment to the next


def ends_of(law: PassLaw, run: Run, launches: list[float]) -> list[tuple[float, float]]:
    """When each pass of a run was scheduled, and when its tokens existed, in seconds."""
    engine_s = 0.0  # the time of the thread that schedules
    gpu_free_s = 0.0
    worker_free_s = 0.0  # of the process that launches, where launches are apart
    queue: list[int] = []
    scheduled: list[float] = []
    gpu_done: list[float] = []
    ends = [0.0] * len(run)
    left = list(range(len(run)))
    while left or queue:
        if left and len(queue) < 2:
            k = left.pop(0)
            shape = run[k]
            scheduled.append(engine_s)
            begins_s = max(engine_s, worker_free_s) if law.apart else engine_s
            launched_s = begins_s + launches[k]
            graph = law.graphs.launch_of(shape)
            work_from_s = launched_s if graph == GRAPH else begins_s
            done_s = max(max(gpu_free_s, work_from_s) + law.gpu_s(shape), launched_s)
            gpu_done.append(done_s)
            gpu_free_s = done_s
            if law.apart:
                worker_free_s = launched_s
            else:
                engine_s = launched_s
            queue.append(k)
            if len(queue) < 2 and left:
                continue  # the queue is not full: the next pass is scheduled at once
        k = queue.pop(0)
        engine_s = max(engine_s, gpu_done[k])
        ends[k] = engine_s
    return list(zip(scheduled, ends, strict=True))


def launches_of(law: PassLaw, run: Run, rng: np.random.Generator, cv: float) -> list[float]:
    """Launches by the law; those that are not graphs vary, and neighbours resemble each other."""
    drift = 0.0
    found = []
    for shape in run:
        drift = 0.9 * drift + (1.0 - 0.9**2) ** 0.5 * rng.standard_normal()
        steady = law.waits_for_launch(shape)
        found.append(law.launch_s(shape) * (1.0 if steady else max(1.0 + cv * drift, 0.3)))
    return found


def profile_of(
    law: PassLaw, runs: list[Run], *, stamps: bool, cv: float = 0.0, seed: int = 0
) -> StepsProfile:
    """A profile of these runs; `stamps`: with launch times. `cv`: of launches that vary."""
    rng = np.random.default_rng(seed)
    points = []
    for run in runs:
        launches = launches_of(law, run, rng, cv)
        end_s = 0.0
        for k, (shape, (scheduled_s, tokens_s)) in enumerate(
            zip(run, ends_of(law, run, launches), strict=True)
        ):
            seconds = tokens_s - max(scheduled_s, end_s)
            launch_s = [launches[k]] if stamps else []
            point = point_of(shape, seconds + SETTLING_S)
            points.append(point.model_copy(update={"idle": k == 0, "launch_s": launch_s}))
            end_s = tokens_s
    return steps_profile(
        points,
        async_scheduling=True,
        graph_sizes=list(law.graphs.sizes),
        graph_mode=law.graphs.mode,
        executor="mp" if law.apart else "uni",
    )


def decodes(rows: int, cached: int, steps: int) -> Run:
    """`rows` decode `steps` tokens each, after `cached` tokens each."""
    return [StepShape(rows, rows * (cached + step)) for step in range(steps)]


def chunk(tokens: int, rows: int = 0, cached: int = 0, prompts: int = 1) -> StepShape:
    """Prompts of `tokens` together, beside `rows` decodes of `cached` tokens each."""
    attended = prompts * chunk_attended(0, tokens // prompts)
    return StepShape(rows, rows * cached, prompts, tokens, attended)


def grid(sizes: tuple[int, ...]) -> list[Run]:
    """The runs of a profile: decodes, chunks alone and beside decodes, and bursts of chunks."""
    runs = [
        decodes(rows, cached, 24) for rows in (1, 8, 32, 96, 256) for cached in (256, 1024, 4096)
    ]
    tokens = (16, 64, 120, 136, 248, 264, 504, 520, 1024, 2048, 4096, 8064)
    for each in tokens:
        for rows in (0, 1, 32, 128):
            around = decodes(rows, 512, 8) if rows else []
            for _ in range(3):
                beside = chunk(each, rows, 520)
                runs.append([*around, beside, *around])
    runs += [[chunk(each) for _ in range(4)] for each in (64, 256, 512, 1024, 2048, 4096)]
    runs += [[chunk(each, prompts=8) for _ in range(3)] for each in (512, 2048, 8000)]
    return runs
