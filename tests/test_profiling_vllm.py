"""vLLM profiled by its log of passes, with a fake server; a law gives the time of its passes."""

import dataclasses
from pathlib import Path

import fake_vllm_server
import pytest
import samples
from pass_logs import header, one_pass

from toolkit.backends.vllm.backend import VllmBackend
from toolkit.backends.vllm.profile import points, refuse_not_modelled, timed
from toolkit.catalogue.resolved import CacheGroup, Drafts, Resolved
from toolkit.errors import EngineError, InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.files.iterations import LoggedRow
from toolkit.laws.features import StepShape
from toolkit.profiling.run import profile


def recipe_for(python: str, source: str = "toy", **settings: object):
    grid = {
        "batch_sizes": [1, 2, 4],
        "input_lengths": [8, 32, 64],
        "cached_lengths": [16, 32, 64],
        "memory_lengths": [16],
        "repeats": 1,
        "slices": 6,
        "slice_tokens": [4],
    }
    return samples.recipe(
        engine={"name": "vllm", "vllm": {"python": python}},
        model={"source": source, "config": {}, "max_model_len": 128},
        workers=1,
        profile=grid | settings,
        serve={"max_new_tokens": 8},
        policy={"name": "aggressive"},
    )


class Watch:
    def planned(self, plan):
        self.plan = plan

    def advanced(self, text):
        pass


def profiled(recipe, folder: Path, watch: Watch | None = None):
    source = folder / "recipe.yaml"
    source.write_text(recipe.model_dump_json(exclude_defaults=True))
    watch = watch or Watch()
    return profile(recipe, source, folder / "profile.json", watch, timed=VllmBackend().timed)


@pytest.mark.slow
def test_vllm_is_profiled_and_fitted_pass_by_pass_also_after_an_interruption(tmp_path: Path):
    class Stops(Watch):
        left = 12

        def advanced(self, text):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    recipe = recipe_for(fake_vllm_server.install(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        profiled(recipe, tmp_path, Stops())
    watch = Watch()
    found = profiled(recipe, tmp_path, watch)
    assert watch.plan.resumed >= 11
    assert (found.engine.engine, found.engine.capacity_tokens, found.engine.max_rows) == (
        "vllm",
        4096,
        256,
    )
    assert len(found.prefill) == len(found.decode) == 9
    assert found.steps is not None
    assert {bool(point.prefills) for point in found.steps.points} == {False, True}
    assert any(point.prefills and point.decodes for point in found.steps.points)
    # 32 and 8 (three times, being short), 64 and 8, 64 and 32: four prompts behind cached blocks
    hits = [one.prefill_cached for one in found.steps.points if one.prefill_cached]
    assert [hits.count(cached) for cached in (32, 64)] == [12, 8]
    assert not found.failed
    fitted = fit_profile(found, samples.HEAD)
    assert fitted.steps is not None
    assert (fitted.steps.blocks, fitted.steps.block_tokens) == (256, 16)
    assert fitted.steps.law.forward_s(StepShape(4, 400, 1, 64, 64 * 32)) > 0.0


@pytest.mark.slow
def test_a_point_that_fails_is_marked_and_the_profile_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        "toolkit.profiling.run.traffic_points", lambda *_: []
    )  # it has more than two at once, too
    found = profiled(
        recipe_for(fake_vllm_server.install(tmp_path), "breaks", batch_sizes=[1, 2, 3]), tmp_path
    )
    assert {(point.kind, point.batch_size) for point in found.failed} >= {
        ("prefill", 3),
        ("decode", 3),
    }
    assert "HTTP 500: the fake breaks" in {point.reason for point in found.failed}
    assert {point.batch_size for point in found.decode} == {1, 2}


@pytest.mark.slow
def test_a_server_that_cannot_load_says_why(tmp_path: Path):
    with pytest.raises(EngineError, match=r"exit code 1.*ValueError.*fake dies"):
        profiled(recipe_for(fake_vllm_server.install(tmp_path), "dies"), tmp_path)


def test_gaps_count_while_requests_wait():
    a = [LoggedRow("a", 20, 1, 16)]
    b = [LoggedRow("b", 20, 1, 16)]
    found = timed(
        [
            one_pass(0.0, 1.0, a),
            one_pass(1.25, 2.0, a, ended=["a"]),  # no request is left
            one_pass(5.0, 6.0, b),
            one_pass(5.5, 7.0, b),  # scheduled while the last one ran
        ]
    )
    assert [each.host_s for each in found] == [0.25, None, None, None]
    assert [each.seconds for each in found] == [1.0, 0.75, 1.0, 1.0]


def test_decodes_are_one_point_and_each_chunked_pass_another():
    decodes = [one_pass(k, k + 0.5, [LoggedRow("a", 20 + k, 1, 16)]) for k in range(4)]
    chunks = [
        one_pass(k, k + 0.5, [LoggedRow("b", 0, 8, 30), LoggedRow("a", 24, 1, 16)]) for k in (4, 5)
    ]
    found = points(timed([*decodes, *chunks]))
    assert [(point.decodes, point.prefills, len(point.seconds)) for point in found] == [
        (1, 0, 4),
        (1, 1, 1),
        (1, 1, 1),
    ]
    assert found[0].decode_cached == 21.5


RESOLVED = Resolved(
    groups=[CacheGroup("full", "FullAttentionSpec", 16, 2, 32768)],
    blocks=1000,
    bytes_per_block=65536,
)


def test_a_server_that_is_not_modelled_is_refused_by_name():
    with pytest.raises(InputError, match="FULL_AND_MORE"):
        refuse_not_modelled(header(async_scheduling=True, graph_mode="FULL_AND_MORE"))


def test_a_server_is_refused_from_what_it_resolved():
    resolved = dataclasses.replace(RESOLVED, drafts=Drafts("ngram", 3, padded=True))
    with pytest.raises(InputError, match="ngram, 3 drafts"):
        refuse_not_modelled(header(resolved=resolved))
