"""A law and the traffic from a server's own log of passes."""

from dataclasses import replace

import pass_logs
import pytest
from samples import HEAD

from toolkit.backends.vllm.from_log import (
    PASSES_MIN,
    coverage,
    profile_of_log,
    read_passes,
    steps_of_log,
)
from toolkit.catalogue.resolved import CacheGroup, Resolved
from toolkit.errors import InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.part_fits import fit_steps
from toolkit.files.io import head
from toolkit.files.iterations import LoggedRow, shape_of_rows
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.laws.features import StepShape

SHAPES = (StepShape(1, 50), StepShape(20, 4000), StepShape(5, 600, 1, 200, 200 * 100.0))


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(recipe_path("tiny-llama-vllm"))


@pytest.fixture(scope="module")
def mixed():
    """Traffic from idle to busy."""
    light = pass_logs.requests(60, 4.0, seed=1)
    last_s = light[-1][0]
    heavy = [(last_s + at_s, *rest) for at_s, *rest in pass_logs.requests(300, 60.0, seed=2)]
    return pass_logs.passes([*light, *heavy])


@pytest.mark.slow
def test_the_law_of_a_log_is_the_law_that_its_passes_had(tmp_path, recipe, mixed):
    path = tmp_path / "passes.jsonl"
    pass_logs.write(path, mixed)
    made, shown = profile_of_log(recipe, read_passes(path), head(inputs={}))
    assert shown.unsure == []
    assert shown.passes == len(mixed)
    fitted = fit_profile(made, HEAD)
    assert fitted.steps is not None
    law = fitted.steps.law
    for shape in SHAPES:
        assert law.forward_s(shape) == pytest.approx(pass_logs.LAW.forward_s(shape), rel=0.08)
    assert fitted.steps.error.median_percent < 5.0
    assert fitted.prefill.error.median_percent < 5.0
    assert made.engine.capacity_tokens == pass_logs.BLOCKS * pass_logs.BLOCK_TOKENS


def test_terms_that_move_together_are_named(recipe):
    """Every request is alike and they never overlap with prompts but one by one."""
    alike = [(0.5 * k, 64, 40) for k in range(60)]
    history = history_of(pass_logs.passes(alike, noise=0.05))
    with pytest.raises(InputError):
        steps_of_log(recipe, history)
    few = [(0.05 * k, 64, 40) for k in range(60)]
    steps = steps_of_log(recipe, history_of(pass_logs.passes(few, noise=0.3)))
    fit = fit_steps(steps, 0)
    assert coverage(fit.law, steps, 0).unsure


def test_passes_with_windows_count_what_is_inside_them(recipe):
    terms = {"inside": 4e-6, "attended_inside": 3e-7}
    law = replace(pass_logs.LAW.with_terms(terms), window=100)
    light = pass_logs.requests(60, 4.0, seed=1)
    heavy = [(light[-1][0] + at_s, *rest) for at_s, *rest in pass_logs.requests(300, 60.0, seed=2)]
    made = pass_logs.passes([*light, *heavy], law=law, noise=0.0)
    full = CacheGroup("full", "FullAttentionSpec", 32, 1, 32768)
    window = CacheGroup("window", "SlidingWindowSpec", 32, 1, 32768, window=100)
    resolved = Resolved([window, full], pass_logs.BLOCKS, 65536)
    steps = steps_of_log(recipe, history_of(made, resolved=resolved))
    fit = fit_steps(steps, 0)
    assert fit.law.window == 100
    shown = coverage(fit.law, steps, len(made))
    assert not shown.absent
    fitted = fit.law
    for rows in ([20] * 3, [90] * 8, [300] * 8):
        shape = shape_of_rows([LoggedRow("", cached, 1, 1) for cached in rows], 100)
        assert fitted.forward_s(shape) == pytest.approx(law.forward_s(shape), rel=0.03)


def history_of(made, **more):
    from toolkit.backends.vllm.from_log import PassHistory

    return PassHistory(pass_logs.header(**more), made)


def test_a_log_that_shows_too_little_is_refused(recipe, mixed):
    with pytest.raises(InputError):
        steps_of_log(recipe, history_of(mixed[: PASSES_MIN - 1]))
    decodes = [one for one in mixed if all(row.decodes for row in one.rows)]
    assert len(decodes) > PASSES_MIN
    with pytest.raises(InputError):
        steps_of_log(recipe, history_of(decodes))


@pytest.mark.parametrize("content", [b"", b"{}\n", b"no log\n"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InputError):
        read_passes(path)
    with pytest.raises(InputError):
        read_passes(tmp_path / "missing")


def test_a_log_that_is_still_written_is_read_up_to_its_last_whole_line(tmp_path, mixed):
    path = tmp_path / "passes.jsonl"
    pass_logs.write(path, mixed[:50])
    with path.open("ab") as file:
        file.write(b'{"step": 51, "sta')
    assert len(read_passes(path).passes) == 50
