"""The deepspeed engine: the facts that it reports, what it refuses, and that it prints nothing."""

import sys

import pytest
import samples
import tiny
from pydantic import ValidationError
from rounds import free_row, go_on
from said import says
from slices import run_slice

from toolkit.engines.protocol import make_engine
from toolkit.errors import EngineError
from toolkit.estimators.part_fits import fit_memory
from toolkit.files.profile import MemoryPoint
from toolkit.files.recipe import EngineSpec

pytestmark = pytest.mark.slow


def spec_of(**changes: object) -> EngineSpec:
    return tiny.engine_spec("deepspeed", **{"kernel_injection": None} | changes)


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")


@pytest.mark.usefixtures("_installed")
def test_on_a_cpu_the_model_passes_through_and_the_facts_say_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    facts = make_engine(tiny.model_spec(), spec_of(), tiny.CPU).facts
    assert facts.engine == "deepspeed"
    assert says(facts.deepspeed, "pass-through", "cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_installed")
def test_kernel_injection_is_refused_without_kernels() -> None:
    with pytest.raises(EngineError, match=r"kernel_injection.*cpu"):
        make_engine(tiny.model_spec(), spec_of(kernel_injection=True), tiny.CPU)


@pytest.mark.usefixtures("_installed")
def test_inputs_longer_than_deepspeed_s_default_limit_run() -> None:
    config = {**tiny.CONFIGS["llama"], "max_position_embeddings": 1500}
    engine = make_engine(tiny.model_spec(config=config, max_model_len=1500), spec_of(), tiny.CPU)
    assert len(run_slice(engine, [free_row(1100, 3)], 3, go_on).tokens[0]) == 3


def test_without_the_package_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(EngineError, match="deepspeed") as caught:
        make_engine(tiny.model_spec(), spec_of(), tiny.CPU)
    assert "pip install" in caught.value.hint


def test_kernel_injection_is_no_key_of_another_engine() -> None:
    with pytest.raises(ValidationError, match=r"kernel_injection.*'deepspeed'"):
        EngineSpec(kernel_injection=True)


def test_probes_like_the_paper_s_give_algorithm_2() -> None:
    """SCLS: 28 rows up to 512 tokens, 22 up to 1,024, 12 beyond. No zeta fits all of them."""
    facts = samples.fit(50_000, engine="deepspeed").engine
    facts = facts.model_copy(update={"max_model_len": 2048})
    ran = {512: 28, 1024: 22, 2048: 12}
    probes = [
        MemoryPoint(input_length=total - 128, steps=128, largest_ok=rows, smallest_oom=rows + 1)
        for total, rows in ran.items()
    ]
    memory = fit_memory(probes, facts)
    assert memory.form == "rules"
    assert [(rule.length_above, rule.max_batch_size) for rule in memory.rules] == [
        (1024, 12),
        (512, 22),
        (0, 28),
    ]
