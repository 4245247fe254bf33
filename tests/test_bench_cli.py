"""`llmctl bench`, from the command line to the report, against a tiny server."""

import json
import os
import signal

import commands
import pytest
import samples
from said import says
from sse_server import late_client, serve_request, sse_server, whole

from toolkit.bench.predict import slowdown_of
from toolkit.bench.session import GIVEN
from toolkit.deploy.plan import make_plan
from toolkit.errors import InputError, LateClientError
from toolkit.files.bench import NOT_SERVERS, BenchReport
from toolkit.files.io import read_file, write_file
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
    with sse_server() as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0, "--out", out, "--json"]
        code, printed, _ = llmctl(capsys, "--url", server.url, *options)
    assert code == 0
    report = json.loads(printed)
    assert report == json.loads(out.read_text())
    assert (report["warmup"], report["predicted_as_fitted"]) == (None, report["predicted"])
    assert (report["model"], report["lengths"], report["requests"], report["answered"]) == (
        "tiny",
        "hidden",
        5,
        5,
    )
    assert (report["failures"], report["wrong_length"], report["interrupted"]) == ({}, 0, False)
    assert {"trace", "plan"} <= report["inputs"].keys()
    assert (report["policy"], report["request_rate_rps"]) == ("slice", pytest.approx(100.0))
    compared = {row["metric"]: row for row in report["compared"]}
    for name, row in compared.items():
        assert row["measured"] == report["measured"][name]
        assert row["predicted"] == report["predicted"][name]
        if row["measured"] > 0:
            assert row["error_percent"] == pytest.approx(
                100 * (row["predicted"] / row["measured"] - 1)
            )
    assert {
        "throughput_rps",
        "goodput_rps",
        "ttft_p99_s",
        "tpot_mean_s",
        "e2e_p95_s",
    } <= compared.keys()
    tried, *bodies = server.bodies
    assert (tried["llmctl_end_after"], tried["max_tokens"], tried["stream"]) == (1, 128, False)
    assert sorted(body["llmctl_end_after"] for body in bodies) == [3, 4, 5, 6, 7]
    assert {body["max_tokens"] for body in bodies} == {128}


@pytest.mark.slow
def test_the_table_fits_80_columns_with_notes_on_the_replay(capsys, trace, plan):
    with sse_server() as server:
        code, out, err = llmctl(capsys, "--url", server.url, "--trace", trace, "--plan", plan)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "throughput_rps" in out
    assert "predicted" in out
    assert says(err, "384")
    assert says(err, "5 requests", "tiny")


def test_another_server_gets_the_lengths_and_the_report_says_so(capsys, trace):
    with sse_server(
        models={"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}]}
    ) as server:
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


def test_saved_requests_can_be_replayed(capsys, tmp_path, trace):
    saved = tmp_path / "requests.jsonl"
    with sse_server() as server:
        assert (
            llmctl(capsys, "--url", server.url, "--trace", trace, "--save-requests", saved)[0] == 0
        )
    again, report = read_trace(saved)
    assert report.dropped == {}
    assert again.output_tokens.tolist() == read_trace(trace)[0].output_tokens.tolist()


def test_failures_are_counted_by_reason(capsys, trace):
    def answer(body):
        if body["stream"] and len(body["prompt"]) == 22:
            return whole({"error": {"message": "busy"}}, 503)
        return serve_request(body)

    with sse_server(answer) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", trace)
    assert code == 0
    assert says(err, "1", "503", "busy")


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


def test_without_hidden_lengths_outputs_are_the_limits(capsys, trace, plan):
    with sse_server(without_end_after) as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0, "--json"]
        code, printed, err = llmctl(capsys, "--url", server.url, *options)
    assert code == 0
    report = json.loads(printed)
    assert (report["lengths"], report["answered"], report["failures"], report["wrong_length"]) == (
        "given",
        5,
        {},
        0,
    )
    *_, a, b, c, d, e = server.bodies
    assert sorted(body["max_tokens"] for body in (a, b, c, d, e)) == [3, 4, 5, 6, 7]
    assert all(body["ignore_eos"] for body in (a, b, c, d, e))
    assert GIVEN in err


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
    assert (
        found["given"]["predicted"]["batch_size_mean"]
        > found["hidden"]["predicted"]["batch_size_mean"]
    )


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
        if body["stream"] and late_s > 2.1:
            return whole(
                {
                    "error": {
                        "message": (
                            f"too many requests wait: the first token would come in {late_s} s"
                        )
                    }
                },
                503,
            )
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
    assert report["measured"]["sla_attainment_percent"] == pytest.approx(40.0)
    assert says(err, "3 of 5", "refused")
    assert "prediction serves" in err


def test_every_target_has_its_row(capsys, trace, plan):
    with sse_server() as server:
        options = ["--trace", trace, "--plan", plan, "--warmup", 0]
        sla = ["--sla", "ttft_p99_s=30", "--sla", "e2e_p95_s=0.000001"]
        code, out, _ = llmctl(capsys, "--url", server.url, *options, *sla)
        assert code == 0
        code, printed, _ = llmctl(capsys, "--url", server.url, *options, *sla, "--json")
    kept = {
        row["target"]: (row["limit_s"], row["kept"], row["predicted_kept"])
        for row in json.loads(printed)["targets"]
    }
    assert kept == {"ttft_p99_s": (30.0, True, True), "e2e_p95_s": (1e-6, False, False)}
    lines = [
        line.split()
        for line in out.splitlines()
        if line.startswith((" ttft_p99_s ", " e2e_p95_s "))
    ]
    assert [line[0] for line in lines if "yes" in line] == ["ttft_p99_s"]
    assert [line[0] for line in lines if "NO" in line] == ["e2e_p95_s"]
    within = next(line for line in out.splitlines() if line.startswith(" requests within all "))
    assert within.count("%") == 2


def test_a_late_client_s_report_is_written_and_does_not_count(capsys, tmp_path, trace, plan):
    out = tmp_path / "bench.json"
    with sse_server() as server, late_client():
        options = ["--trace", trace, "--plan", plan, "--warmup", 0, "--out", out]
        code, printed, err = llmctl(capsys, "--url", server.url, *options, "--max-error", 1)
    assert code == LateClientError.exit_code == 6
    assert NOT_SERVERS in printed
    assert NOT_SERVERS in err
    report = read_file(BenchReport, out)
    assert report.client.late
    assert report.late
    assert report.measured["requests"] == 5
    with pytest.raises(InputError, match="measured"):
        slowdown_of(report)


def test_a_client_in_time_is_recorded_too(capsys, trace):
    with sse_server() as server:
        code, printed, _ = llmctl(capsys, "--url", server.url, "--trace", trace, "--json")
    client = json.loads(printed)["client"]
    assert code == 0
    assert not client["late"]
    assert client["beats"] > 0
    assert client["connect_p99_s"] >= client["connect_late_p99_s"]


def test_a_rate_other_than_the_tuned_one_is_noted(capsys, tmp_path, trace):
    plan = tmp_path / "plan.json"
    tuned = make_plan(samples.recipe(), samples.fit(), None, {})
    workload = PlannedWorkload(trace="trace.jsonl", request_rate_rps=50.0)
    write_file(tuned.model_copy(update={"workload": workload}), plan)
    with sse_server() as server:
        _, _, err = llmctl(
            capsys, "--url", server.url, "--trace", trace, "--plan", plan, "--warmup", 0
        )
        _, _, same = llmctl(
            capsys,
            "--url",
            server.url,
            "--trace",
            trace,
            "--plan",
            plan,
            "--warmup",
            0,
            "--rate",
            50,
        )
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


@pytest.mark.parametrize("owner", ["llmctl", "vllm"])
def test_a_server_that_is_still_loading_says_to_try_again(capsys, trace, owner):
    refusal = whole({"error": {"message": "the server is loading"}}, 503)
    with sse_server(
        lambda body: refusal, models={"data": [{"id": "m", "owned_by": owner}]}
    ) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", trace)
    assert code == 2
    assert says(err, "503", "loading")
    assert "hint: " in err


def test_a_wrong_key_says_where_to_put_it(capsys, trace):
    refusal = whole({"error": {"message": "no or a wrong key"}}, 401)
    with sse_server(lambda body: refusal) as server:
        code, _, err = llmctl(capsys, "--url", server.url, "--trace", trace)
    assert code == 2
    assert says(err, "LLMCTL_API_KEY")


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
