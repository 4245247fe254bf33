"""The rows that a worker keeps between rounds: their numbers, and the results of rounds."""

from toolkit.engines.protocol import Round, RoundOutput, SamplingParams
from toolkit.sched.types import Batch, Job, Moves, Request
from toolkit.serve.driver import ResidentRows
from toolkit.serve.live import ActiveRequest, GenerationRequest


def job(name: str) -> Job:
    return Job(Request(name, 0.0, 3, 10), 0, 3)


def live(name: str) -> ActiveRequest:
    return ActiveRequest(GenerationRequest(name, (1, 2, 3), 10, SamplingParams()), None, None, 0.0)  # type: ignore[arg-type]


def batch(*enter: Job, **changes) -> Batch:
    return Batch(0, enter, 5, 3, 0.0, "any", keep_cache=True, batch_id=4, stop_every=2, **changes)


class Desk:
    """The resident rows of a, b and c, which entered in the first round."""

    def __init__(self) -> None:
        self.kept = ResidentRows()
        self.jobs = {name: job(name) for name in "abcd"}
        self.first = self.begin(batch(*[self.jobs[name] for name in "abc"]))

    def begin(self, batch: Batch) -> Round:
        self.batch = batch
        return self.kept.begin(batch, live)

    def give(self, tokens: dict[int, int], *ended: int) -> None:
        for number, count in tokens.items():
            self.kept.receive(number, count, ended=number in ended)


def test_entering_rows_get_numbers() -> None:
    desk = Desk()
    assert (desk.first.numbers, desk.first.steps, desk.first.stop_every) == ((0, 1, 2), 5, 2)
    assert [row.request_id for row in desk.first.enter] == ["a", "b", "c"]
    moves = Moves(pause=(desk.jobs["a"],), swap_out=(desk.jobs["b"],), overlap=True)
    second = desk.begin(batch(desk.jobs["d"], evict=(desk.jobs["c"],), moves=moves))
    assert (second.numbers, second.evict, second.pause, second.swap_out) == ((3,), (2,), (0,), (1,))
    assert second.overlap


def test_a_row_that_returns_after_an_eviction_gets_a_new_number() -> None:
    desk = Desk()
    assert desk.begin(batch(evict=(desk.jobs["a"],))).evict == (0,)
    assert desk.begin(batch(desk.jobs["a"])).numbers == (3,)


def test_a_reassigned_row_is_dropped_and_a_finished_one_skipped() -> None:
    desk = Desk()
    desk.kept.result(desk.batch, RoundOutput(5, ((0, 0), (1, 0), (2, 0)), (1,), 0, 0))
    plan = desk.begin(batch(release=(desk.jobs["a"],), evict=(desk.jobs["b"],)))
    assert plan.evict == (0,)


def test_a_round_s_result_names_requests() -> None:
    desk = Desk()
    result = desk.kept.result(desk.batch, RoundOutput(5, ((0, 0), (1, 0), (2, 0)), (2, 0), 0, 0))
    assert (result.steps, result.ended, result.joined, result.failure) == (5, ("c", "a"), None, "")
    shaped = desk.kept.result(desk.batch, RoundOutput(5, ((1, 1),), (), 0, 0))
    assert shaped.joined == (("b", 1),)


def test_a_round_carries_the_steps_before_it() -> None:
    desk = Desk()
    assert desk.first.steps_before == 0
    desk.kept.result(desk.batch, RoundOutput(5, ((0, 0), (1, 0), (2, 0)), (), 0, 0))
    second = desk.begin(batch())
    assert second.steps_before == 5
    desk.give({0: 2, 1: 2, 2: 1})
    assert desk.kept.crashed(desk.batch).steps == 2
    assert desk.begin(batch()).steps_before == 7, (
        "a worker that was started again has made none of them"
    )


def test_a_crash_keeps_received_tokens_and_forgets_all_rows() -> None:
    desk = Desk()
    desk.give({0: 3, 1: 3, 2: 2}, 2)
    result = desk.kept.crashed(desk.batch)
    assert (result.steps, result.ended, result.failure) == (2, ("c",), "crashed")
    assert result.joined == (("a", 0), ("b", 0), ("c", 1))  # c in a later pass, after a step
    again = desk.begin(batch(desk.jobs["a"], desk.jobs["b"]))
    assert (again.numbers, again.evict) == ((3, 4), ())


def test_steps_of_a_failed_round_count_earlier_rows() -> None:
    desk = Desk()
    desk.kept.result(desk.batch, RoundOutput(5, ((0, 0), (1, 0), (2, 0)), (), 0, 0))
    desk.begin(batch(desk.jobs["d"]))
    desk.give({0: 4, 1: 4, 2: 4})
    result = desk.kept.crashed(desk.batch)
    assert (result.steps, result.joined) == (4, ())


def test_rows_dropped_for_lack_of_memory_are_named_and_removed() -> None:
    desk = Desk()
    desk.give({0: 3, 1: 3, 2: 2})
    result = desk.kept.result(
        desk.batch, RoundOutput(2, ((0, 0), (1, 0), (2, 1)), (1,), 0, 0, (2,))
    )
    assert (result.failure, result.dropped, result.ended) == ("oom", ("c",), ("b",))
    plan = desk.begin(
        batch(desk.jobs["c"], evict=(desk.jobs["c"],), moves=Moves(pause=(desk.jobs["a"],)))
    )
    assert (plan.evict, plan.pause, plan.numbers) == ((), (0,), (3,))
