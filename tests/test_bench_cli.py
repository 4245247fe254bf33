"""`llmctl bench`, from the command line to the report, against a tiny server."""

import json
import os
import signal

import commands
import pytest
import samples
from said import says
from sse_server import serve_request, sse_server, whole

from toolkit.bench.session import GIVEN
from toolkit.deploy.plan import make_plan
from toolkit.files.io import write_file
from toolkit.files.plan import PlannedWorkload
from toolkit.traces.read import read_trace
from toolkit.traces.write import TraceLine, write_lines


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_lines([TraceLine(10 * k, 20 + k, 3 + k) for k in range(5)], path)
    return path


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), path)
    return path


def llmctl(capsys, *args: object) -> tuple[int, str, str]:
    return (commands.llmctl("bench", *args), *capsys.readouterr())


@pytest.mark.slow
def test_a_plan_s_prediction_stands_beside_what_was_measured(capsys, tmp_path, trace, plan):
    out = tmp_path / "bench.json"
    saved = tmp_path / "requests.jsonl"
    with sse_server() as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0, "--out", out, "--json"]
        options += ["--save-requests", saved]
        code, printed, _ = llmctl(capsys, "--url", server.url, *options)
    assert code == 0
    report = json.loads(printed)
    assert report == json.loads(out.read_text())
    assert (report["warmup"], report["predicted_as_fitted"]) == (None, report["predicted"])
    assert (report["model"], report["lengths"]) == ("tiny", "hidden")
    assert (report["requests"], report["answered"], report["client"]["late"]) == (5, 5, False)
    assert (report["failures"], report["wrong_length"], report["interrupted"]) == ({}, 0, False)
    assert {"trace", "plan"} <= report["inputs"].keys()
    assert (report["policy"], report["request_rate_rps"]) == ("slice", pytest.approx(100.0))
    compared = {row["metric"]: row for row in report["compared"]}
    for name, row in compared.items():
        assert row["measured"] == report["measured"]["metrics"][name]
        assert row["predicted"] == report["predicted"]["metrics"][name]
        if row["measured"] > 0:
            assert row["error_percent"] == pytest.approx(
                100 * (row["predicted"] / row["measured"] - 1)
            )
    wanted = "throughput_rps goodput_rps ttft_p99_s tpot_mean_s e2e_p95_s"
    assert {*wanted.split()} <= compared.keys()
    tried, *bodies = server.bodies
    assert (tried["llmctl_end_after"], tried["max_tokens"], tried["stream"]) == (1, 128, False)
    assert sorted(body["llmctl_end_after"] for body in bodies) == [3, 4, 5, 6, 7]
    assert {body["max_tokens"] for body in bodies} == {128}
    again, read = read_trace(saved)  # it can be replayed
    assert read.dropped == {}
    assert again.output_tokens.tolist() == read_trace(trace)[0].output_tokens.tolist()


def test_another_server_gets_the_lengths_and_the_report_says_so(capsys, trace):
    models = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}
    with sse_server(models=models) as server:
        code, out, err = llmctl(capsys, "--url", server.url, "--trace", trace)
    assert code == 0
    assert "predicted" not in out
    assert GIVEN in err
    assert sorted(body["max_tokens"] for body in server.bodies[1:]) == [3, 4, 5, 6, 7]


def test_lengths_are_fitted_to_what_the_server_takes(capsys, tmp_path):
    path = tmp_path / "long.jsonl"
    write_lines([TraceLine(k, 1000, 1000) for k in range(3)], path)
    with sse_server() as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", path)
    assert code == 0
    assert {(len(body["prompt"]), body["llmctl_end_after"]) for body in server.bodies[1:]} == {
        (64, 64)
    }
    assert says(err, "15.62")


def test_a_part_of_the_trace_at_another_rate(capsys, trace):
    """At 200/s the five requests arrive at 0, 5, 10, 15 and 20 ms; three of them in 15 ms."""
    with sse_server() as server:
        options = ["--rate", 200, "--duration", 0.015]
        code, printed, _ = llmctl(capsys, "--url", server.url, "--trace", trace, *options, "--json")
    assert code == 0
    assert json.loads(printed)["requests"] == 3
    assert says(json.loads(printed)["trace_notes"][-1], "0.015", "3")


def test_a_replay_in_which_nothing_was_served_fails(capsys, tmp_path, trace):
    def answer(body):
        return whole({"error": {"message": "busy"}}, 503) if body["stream"] else serve_request(body)

    out = tmp_path / "bench.json"
    with sse_server(answer) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", trace, "--out", out)
    assert code == 1
    assert says(err, "5", "503", "busy")
    assert json.loads(out.read_text())["failures"] == {"HTTP 503: busy": 5}


def test_ctrl_c_reports_what_was_answered(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    out = tmp_path / "bench.json"
    write_lines([TraceLine(0, 20, 3), TraceLine(50, 21, 3), TraceLine(10**8, 22, 3)], path)

    def answer(body):
        if len(body["prompt"]) == 21:
            os.kill(os.getpid(), signal.SIGINT)
            return None
        return serve_request(body)

    with sse_server(answer) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", path, "--out", out)
    assert code == 130
    assert says(err, "1 of 3")
    assert json.loads(out.read_text())["interrupted"] is True


NO_END_AFTER = whole(
    {"error": {"message": "'llmctl_end_after' needs a server started with --allow-end-after"}}, 400
)


def without_end_after(body: dict) -> bytes | None:
    """What a server answers that was started without --allow-end-after."""
    return NO_END_AFTER if "llmctl_end_after" in body else serve_request(body)


@pytest.mark.slow
def test_the_prediction_uses_the_limits_of_the_requests(capsys, tmp_path):
    """A policy that reserves each request's limit has room for more at once where the limit is the
    output.
    """
    recipe = samples.recipe(policy={"name": "conservative"}, workers=1)
    plan = tmp_path / "plan.json"
    path = tmp_path / "trace.jsonl"
    found = {}
    write_file(make_plan(recipe, samples.fit(capacity_tokens=512, workers=1), None, {}), plan)
    write_lines([TraceLine(0, 20, 8)] * 24, path)
    for name, answer in {"hidden": serve_request, "given": without_end_after}.items():
        with sse_server(answer) as server:
            options = ["--trace", path, "--plan", plan, "--warmup", 0, "--json"]
            code, printed, _ = llmctl(capsys, "--url", server.url, *options)
        assert code == 0
        found[name] = json.loads(printed)
        assert found[name]["lengths"] == name
    sizes = {name: one["predicted"]["metrics"]["batch_size_mean"] for name, one in found.items()}
    assert sizes["given"] > sizes["hidden"]


def test_hidden_lengths_that_the_server_refuses_name_the_flag(capsys, trace):
    with sse_server(without_end_after) as server:
        code, out, err = llmctl(
            capsys, "--url", server.url, "--trace", trace, "--lengths", "hidden"
        )
    assert (code, out) == (2, "")
    assert says(err, "400", "'llmctl_end_after'", "--allow-end-after")
    assert says(err, "llmctl serve --allow-end-after", "--lengths")
    assert len(server.bodies) == 1


def test_refused_requests_are_counted_apart(capsys, trace, plan):
    def answer(body):
        late_s = len(body["prompt"]) / 10
        why = f"too many requests wait: the first token would come in {late_s} s"
        if body["stream"] and late_s > 2.1:
            return whole({"error": {"message": why}}, 503)
        return serve_request(body)

    with sse_server(answer) as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0, "--json"]
        code, printed, err = llmctl(capsys, "--url", server.url, *options)
    assert code == 0
    report = json.loads(printed)
    assert report["refused"] == 3
    ((why, count),) = report["failures"].items()
    assert count == 3
    assert says(why, "503")
    assert report["measured"]["metrics"]["sla_attainment_percent"] == pytest.approx(40.0)
    assert says(err, "3 of 5")


def test_every_target_has_its_row(capsys, trace, plan):
    with sse_server() as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0]
        sla = ["--sla", "ttft_p99_s=30", "--sla", "e2e_p95_s=0.000001"]
        code, out, _ = llmctl(capsys, "--url", server.url, *options, *sla)
        assert code == 0
        code, printed, _ = llmctl(capsys, "--url", server.url, *options, *sla, "--json")
    found = json.loads(printed)
    assert found["sla"] == {"ttft_p99_s": 30.0, "e2e_p95_s": 1e-6}
    for part in ("measured", "predicted"):
        kept = {name: share <= 1.0 for name, share in found[part]["used"].items()}
        assert kept == {"ttft_p99_s": True, "e2e_p95_s": False}
    lines = [line.split() for line in out.splitlines() if line]
    assert [line[0] for line in lines if "yes" in line] == ["ttft_p99_s"]
    assert [line[0] for line in lines if "NO" in line] == ["e2e_p95_s"]
    assert max(map(len, out.splitlines())) <= 80


def test_a_rate_other_than_the_tuned_one_is_noted(capsys, tmp_path, trace):
    plan = tmp_path / "plan.json"
    tuned = make_plan(samples.recipe(), samples.fit(), None, {})
    workload = PlannedWorkload(trace="trace.jsonl", request_rate_rps=50.0)
    write_file(tuned.model_copy(update={"workload": workload}), plan)
    with sse_server() as server:
        words = ["--url", server.url, "--trace", trace, "--plan", plan, "--warmup", 0]
        _, _, err = llmctl(capsys, *words)
        _, _, same = llmctl(capsys, *words, "--rate", 50)
    assert says(err, "50", "100", "--rate")
    assert not says(same, "--rate")


def test_without_a_url_the_plans_own_address_is_asked(capsys, tmp_path, trace):
    with sse_server() as server:
        port = int(server.url.rpartition(":")[2])
        plan = tmp_path / "plan.json"
        recipe = samples.recipe(serve={"port": port, "max_new_tokens": 128})
        write_file(make_plan(recipe, samples.fit(), None, {}), plan)
        code, _, _ = llmctl(capsys, "--trace", trace, "--plan", plan, "--warmup", 0)
    assert code == 0
    assert len(server.bodies) == 1 + 5


@pytest.mark.parametrize(
    ("owner", "status", "named"),
    [
        ("llmctl", 503, ("503", "no reason")),
        ("vllm", 503, ("503", "no reason")),
        ("llmctl", 401, ("LLMCTL_API_KEY",)),
    ],
)
def test_a_server_that_loads_or_wants_a_key_is_named_with_what_to_do(
    capsys, trace, owner, status, named
):
    refusal = whole({"error": {"message": "no reason"}}, status)
    models = {"data": [{"id": "m", "owned_by": owner}]}
    with sse_server(lambda body: refusal, models=models) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", trace)
    assert code == 2
    assert says(err, *named)
    assert "hint: " in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--url", "nowhere"], "'nowhere'"),
        (["--url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models"),
        (["--trace", "no-such"], "no-such"),
        (["--plan", "no-such.json"], "no-such.json"),
        (["--sla", "ttft_p99=2"], "--sla ttft_p99"),
    ],
)
def test_bad_input_is_one_clear_line_with_exit_code_2(capsys, args, named):
    code, out, err = llmctl(capsys, *args)
    assert (code, out) == (2, "")
    assert says(err, named)
