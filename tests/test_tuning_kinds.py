"""A fleet of unlike servers: `tune` finds each kind's own flags, which reach plan and servers."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import samples
from commands import llmctl
from orders import changed
from test_fleet_files import write_fleet, write_server

from toolkit.backends.vllm.backend import VllmBackend
from toolkit.cli.basis import open_fleet, plan_from
from toolkit.cli.serve_start import override
from toolkit.cli.tune_output import show
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import file_text, head, write_file
from toolkit.files.plan import Kind, Plan, PlannedPolicy
from toolkit.files.tuning import Outcome, Tuning
from toolkit.gateway.launch import kinds_of_replicas
from toolkit.report.material import gather
from toolkit.report.page import summary_section
from toolkit.traces.generate import Arrivals, generate, parse_lengths
from toolkit.tuning.evaluate import Evaluation, EvaluationSetup, Task
from toolkit.tuning.executor import InProcessRunner, JournalFile, Remembering, collect
from toolkit.tuning.fleet_size import FleetCounts, Mixes
from toolkit.tuning.inputs import Inputs, settings_of
from toolkit.tuning.search import ALIKE
from toolkit.tuning.spaces import with_kinds
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import make_workload

SLA = {"ttft_p95_s": 2.0, "mtpot_p95_s": 0.08}
TUNE = {
    "trials": 32,
    "draws": 0,
    "windows": 1,
    "held_out_windows": 1,
    "request_rate_rps": 25.0,
    "routers": ["own"],
}
VLLM = {"name": "vllm", "parameters": {"max_num_seqs": 64, "max_num_batched_tokens": 512}}
FEW = (0.06, 1e-5)
SHORT = (1e-3, 4e-4)  # `passes` of both kinds
FIXED = TUNE | {"space": {"max_num_seqs": [64, 64]}}
NARROW = TUNE | {"space": {"max_num_seqs": [64, 64], "max_num_batched_tokens": [64, 512]}}


def passes(base_s: float, token_s: float) -> Fit:
    """A server with passes of `base_s`, and `token_s` for each new token."""
    plain = samples.paged_fit(65536)
    return changed(plain, steps__base_s=base_s, steps__token_s=[token_s, token_s])


def kind(name: str, times: tuple[float, float], workers: int = 1, **changes: Any) -> Kind:
    spec = {"engine": {"name": "vllm"}, "policy": VLLM, "sla": SLA, "tune": FIXED}
    recipe = samples.recipe(name=name, workers=workers, **(spec | changes))
    return Kind(recipe=recipe, fit=passes(*times), workers=workers)


# A pass of the first kind is long whatever it holds, so prompts should need few passes. One of the
# second kind is as long as its tokens, so other requests should not wait for many.
def unlike(**changes: Any) -> Inputs:
    few = kind("few", FEW, **changes)
    short = kind("short", SHORT, 2, tune=NARROW)
    arrivals = Arrivals(16.0)
    trace = generate(arrivals, 60.0, parse_lengths("fixed:384"), parse_lengths("fixed:12"), 0)
    workload = make_workload(few.recipe, few.fit, trace, [short])
    return Inputs(few.recipe, few.fit, workload, None, (short,))


def budgets(outcome: Outcome) -> list[int]:
    """Tokens of a pass, of both kinds."""
    flags = outcome.parameters, outcome.kind_parameters["short"]
    return [int(each["max_num_batched_tokens"]) for each in flags]


@pytest.fixture(scope="module")
def tuned() -> Tuning:
    return tune(unlike(), InProcessRunner(), samples.HEAD, lambda best: None)


def same_for_all(setup: EvaluationSetup) -> list[Evaluation]:
    """One set of flags for both kinds, with more and more tokens in a pass."""
    tasks = []
    for tokens in (64, 96, 128, 160, 192, 224, 256, 384, 512):
        flags = VLLM["parameters"] | {"max_num_batched_tokens": tokens}
        tasks.append(Task(setup, "vllm", flags, kind_parameters={"short": flags}))
    return [task.run() for task in tasks]


@pytest.mark.slow
def test_each_kind_gets_flags_of_its_own_where_one_set_cannot_suit_both(tuned: Tuning) -> None:
    given = unlike()
    first, second = budgets(tuned.best)
    assert second < 190 < 256 < first
    assert tuned.keeps_limits
    assert not tuned.keep_defaults
    best, before = (each.metrics["goodput_rps"] for each in (tuned.best, tuned.defaults))
    setup = given.setup("held out", given.workload.windows.held_out)
    same = same_for_all(setup)
    assert not any(each.feasible(setup.limits) for each in same)
    assert best > 1.5 * max(before, *(each.goodput_rps for each in same))


@pytest.mark.slow
def test_the_first_trials_have_the_recipes_flags_and_then_the_same_for_all(tuned: Tuning) -> None:
    trials = [budgets(trial.outcome) for trial in tuned.trials]
    assert trials[0] == [512, 512]
    alike = [second == min(first, 512) for first, second in trials]
    assert all(alike[: ALIKE - 1])
    assert len({first for first, _ in trials[: ALIKE - 1]}) > 3
    assert not any(alike[ALIKE:])


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_also_from_a_journal(tmp_path: Path) -> None:
    given = unlike(tune=FIXED | {"trials": 9})
    plain = tune(given, InProcessRunner(), samples.HEAD, lambda best: None)
    for _ in range(2):  # the second takes all from the first's journal
        kept = Remembering(InProcessRunner(), JournalFile(tmp_path / "journal", "same"))
        assert file_text(tune(given, kept, samples.HEAD, lambda best: None)) == file_text(plain)
    assert kept.remembered


def test_a_kind_has_the_ranges_of_its_own_recipe() -> None:
    given = unlike()
    narrow = TUNE | {"space": {"max_num_batched_tokens": [64, 96]}}
    own, *_ = settings_of(given.recipe, given.fit, [kind("short", SHORT, tune=narrow)]).spaces
    searched = own.distributions
    among = searched["short.max_num_batched_tokens"]
    assert (among.low, among.high) == (64, 512)  # it holds the recipe's
    assert searched["max_num_batched_tokens"].low == 256
    wrong = kind("short", SHORT, tune=TUNE | {"space": {"max_num_seq": [1, 2]}})
    with pytest.raises(InputError, match=r"'vllm'.*'max_num_seq'"):
        with_kinds(own, [wrong], 2)


@pytest.mark.slow
def test_counts_are_tried_with_the_flags_of_each_kind(tuned: Tuning) -> None:
    evaluate = partial(collect, InProcessRunner())
    sizes = FleetCounts(unlike(), Mixes((), ()), evaluate, lambda more: None)
    recipes = Outcome(policy="vllm", parameters=VLLM["parameters"], metrics={})
    judged = [sizes.judged("recipe", recipes), sizes.judged("tuned", tuned.best)]
    assert [sizes.keeps(each, (1, 2)) for each in judged] == [False, True]
    assert judged[1].work.allows((1, 2))


# From the tuning to the servers


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """The fleet of `unlike` with recipes in files."""
    for name, times in (("few", FEW), ("short", SHORT)):
        write_server(tmp_path, name, sla=SLA, tune=TUNE, policy=VLLM)
        made = head({"recipe": tmp_path / f"{name}.yaml"})
        facts = passes(*times).model_copy(update={"recipe_name": name, **made})
        write_file(facts, tmp_path / f"{name}.fit.json")
    return write_fleet(tmp_path, ("few", 1), ("short", 2))


def plan_of(servers: Path, tuning: Tuning | None, given: PlannedPolicy | None = None) -> Plan:
    first, *others = open_fleet(servers).kinds
    own = tuning and tuning.model_copy(update={"recipe_name": "few"})
    return make_plan(first.recipe, first.fit, own, {}, given, others, 1)


def of_plan(plan: Plan, flag: str = "max_num_batched_tokens") -> list[object]:
    return [plan.policy_of(number)[flag] for number in range(len(plan.kinds))]


@pytest.mark.slow
def test_a_plan_starts_each_kind_with_the_flags_that_were_found(
    servers: Path, tuned: Tuning
) -> None:
    plan = plan_of(servers, tuned)
    assert of_plan(plan) == budgets(tuned.best)
    assert plan.predicted == tuned.best.metrics
    source = plan.explained["short: max_num_batched_tokens"].source
    assert source == plan.explained["max_num_batched_tokens"].source
    assert source.startswith("trial ")
    assert "vLLM's default" in plan.explained["short: chunked_prefill"].source
    for number, tokens in enumerate(of_plan(plan)):
        described = VllmBackend().described(plan.alone(number), "m")
        flags = [word for words, _ in described.flags for word in words]
        assert flags[flags.index("--max-num-batched-tokens") + 1] == str(tokens)
    assert [live.traits.pass_tokens for live in kinds_of_replicas(plan)] == of_plan(plan)
    assert Plan.model_validate_json(file_text(plan)) == plan


@pytest.mark.slow
def test_an_older_tuning_leaves_further_kinds_their_recipes_flags(
    servers: Path, tuned: Tuning
) -> None:
    content = json.loads(file_text(tuned))
    outcomes = [content[key] for key in ("defaults", "best", "in_turn")]
    outcomes += [trial["outcome"] for trial in content["trials"]]
    outcomes += [result["outcome"] for result in content["policies"]]
    for outcome in outcomes:
        assert outcome.pop("kind_parameters")
    older = Tuning.model_validate(content)
    assert "kind_parameters" not in file_text(older)
    plan = plan_of(servers, older)
    assert of_plan(plan) == [budgets(tuned.best)[0], 512]
    assert plan.explained["short: max_num_batched_tokens"].source.endswith("; not tuned")


@pytest.mark.slow
def test_flags_are_set_for_all_kinds_or_for_one(servers: Path, tuned: Tuning) -> None:
    tokens = "max_num_batched_tokens"
    given = {tokens: 300, f"short.{tokens}": 80, "few.watermark": 0.1}
    plan = plan_of(servers, tuned, PlannedPolicy(name="vllm", parameters=given))
    assert (of_plan(plan), of_plan(plan, "watermark")) == ([300, 80], [0.1, 0.0])
    assert plan.explained["short: max_num_batched_tokens"].source == "set by --set"
    assert not plan.predicted  # other settings than the tuned ones
    best = tuned.best
    same = dict(best.parameters) | {
        f"short.{name}": value for name, value in best.kind_parameters["short"].items()
    }
    again = plan_of(servers, tuned, PlannedPolicy(name="vllm", parameters=same))
    assert (again.predicted, of_plan(again)) == (best.metrics, budgets(best))
    served = override(again, None, ["short.max_num_seqs=4"], None)
    assert of_plan(served, "max_num_seqs")[1] == 4
    assert of_plan(served, "max_num_seqs")[0] == best.parameters["max_num_seqs"]
    assert served.explained["short: max_num_seqs"].source == "set by --set"
    assert not served.predicted
    with pytest.raises(InputError, match=r"'shrt\.max_num_seqs'"):
        override(again, None, ["shrt.max_num_seqs=4"], None)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_a_simulation_takes_the_flags_of_one_kind(
    servers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(servers.parent)
    words = [command, "--fleet", "fleet.yaml", "--sla", "mtpot_p95_s=0.08", "--json"]
    words += ["--policy" if command == "simulate" else "--policies", "vllm"]

    def goodput(*more: str) -> Any:
        assert llmctl(*words, *more) == 0
        found = json.loads(capsys.readouterr().out)
        return found["runs"][0]["metrics"] if command == "compare" else found

    plain = goodput()
    changed = goodput("--set", "short.max_num_batched_tokens=64")
    assert changed["goodput_rps"] != plain["goodput_rps"]
    if command == "simulate":
        flags = changed["kind_parameters"]["short"]
        assert flags["max_num_batched_tokens"] == 64
        assert changed["parameters"]["max_num_batched_tokens"] == 512
    assert llmctl(*words, "--set", "shrt.max_num_seqs=1") != 0
    assert "shrt" in capsys.readouterr().err


@pytest.mark.slow
def test_every_kinds_flags_are_shown(
    tuned: Tuning, capsys: pytest.CaptureFixture[str], servers: Path
) -> None:
    show(tuned)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    found = budgets(tuned.best)[1]
    assert re.search(rf"^ *short\.max_num_batched_tokens +512 +{found} *$", out, re.MULTILINE)
    assert any(one.parameter == "short.max_num_batched_tokens" for one in tuned.sensitivity)
    plan = plan_of(servers, tuned)
    write_file(plan, servers.with_name("plan.json"))
    facts = dict(summary_section(gather(servers.with_name("plan.json"))).facts)
    assert f"max_num_batched_tokens {budgets(tuned.best)[1]}" in facts["Parameters of short"]


@pytest.mark.slow
def test_a_long_name_of_a_kind_is_readable_at_80_columns(
    tuned: Tuning, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "llama-3.1-8b-a100-80gb"
    show(Tuning.model_validate_json(file_text(tuned).replace('"short', f'"{name}')))
    parameters, swings = capsys.readouterr().out.split("how far goodput moves")
    assert re.search(
        rf"^ {re.escape(name)}\. +512 .*\n   max_num_batched_tokens ", parameters, re.MULTILINE
    )
    assert re.search(
        rf"^ {re.escape(name)}\. +\d+\.\d %.*\n   max_num_batched_tokens ", swings, re.MULTILINE
    )
    assert max(map(len, (parameters + swings).splitlines())) <= 80


def test_a_member_has_a_price_of_its_own(servers: Path) -> None:
    text = servers.read_text()
    servers.write_text(text.replace("workers: 1}", "workers: 1, usd_per_hour: 2.5}", 1))
    prices = [one.recipe.hardware.usd_per_hour for one in open_fleet(servers).kinds]
    assert prices == [2.5, None]
    plan, _ = plan_from(servers, None, None)
    assert plan.recipe.hardware.usd_per_hour == 2.5
    for wrong in ("0", "-1", ".inf"):
        servers.write_text(text.replace("workers: 1}", f"workers: 1, usd_per_hour: {wrong}}}", 1))
        with pytest.raises(InputError, match=r"fleet\[0\].usd_per_hour"):
            open_fleet(servers)
