"""The driver between scheduler, workers and replies. The tests move the workers by hand, and do not
depend on the clock.
"""

import asyncio

from toy_server import HandWorkers, generate, make_driver, turns
from within import in_a_loop, with_driver

from toolkit.engines.protocol import SamplingParams
from toolkit.engines.tokenizer import ByteDetokenizer
from toolkit.openai.answers import AnswerWriter
from toolkit.sched.types import Job
from toolkit.server.driver import Driver
from toolkit.server.live import LiveRequest, Reply, TextOutput


def submit(
    driver: Driver,
    name: str = "a",
    prompt: str = "hello",
    limit: int = 20,
    end_after: int | None = None,
    stops: tuple[str, ...] = (),
) -> LiveRequest:
    writer = AnswerWriter({}, chat=False)
    reply = Reply(writer, len(prompt), streams=True, keepalive_s=10.0)
    output = TextOutput(ByteDetokenizer(), stops)
    tokens = tuple(prompt.encode())
    live = LiveRequest(name, tokens, limit, SamplingParams(), output, reply, end_after=end_after)
    assert driver.submit(live) is None
    return live


@with_driver()
async def test_tokens_reach_the_client_before_their_batch_ends(driver: Driver, hands: HandWorkers):
    live = submit(driver)
    await turns()
    hands.progress(steps=3)
    assert live.unsent.encode() == bytes(generate("hello", 3))
    assert (len(live.tokens), live.status) == (3, "")


@with_driver()
async def test_the_next_slice_continues_from_prompt_and_output(driver: Driver, hands: HandWorkers):
    live = submit(driver, limit=20)
    for _ in range(3):  # slices of 8: 8, 8, 4
        await turns()
        hands.finish()
    assert live.tokens == generate("hello", 20)
    assert live.status == "length"
    assert [(len(rows[0].tokens), rows[0].generated) for rows in hands.rows] == [
        (5, 0),
        (13, 8),
        (21, 16),
    ]


@with_driver()
async def test_requests_of_one_loop_turn_share_a_tick_and_a_batch(
    driver: Driver, hands: HandWorkers
):
    for name in "abc":
        submit(driver, name)
    await turns()
    assert [[row.request_id for row in rows] for rows in hands.rows] == [["a", "b", "c"]]


@with_driver()
async def test_a_client_gets_the_end_of_its_row_before_the_batch_ends(
    driver: Driver, hands: HandWorkers
):
    short = submit(driver, "short", limit=2)
    long = submit(driver, "long", limit=50)
    await turns()
    hands.progress(steps=4)
    assert short.unsent.encode() == bytes(generate("hello", 2))
    assert (short.status, long.status) == ("length", "")
    assert (driver.running, driver.waiting) == (1, 0)


@with_driver(workers=2)
async def test_a_killed_worker_loses_no_token_and_repeats_none(driver: Driver, hands: HandWorkers):
    live = submit(driver, limit=20)
    await turns()
    hands.progress(0, steps=5)
    hands.crash(0, steps=5)
    await turns()
    hands.finish(1)
    await turns()
    hands.finish(1 if 1 in hands.running else 0)
    await turns()
    assert live.tokens == generate("hello", 20)
    assert live.unsent.encode() == bytes(generate("hello", 20))
    assert driver.stats.restarts == {0: 1}


@with_driver()
async def test_a_request_waits_until_its_only_worker_is_back(driver: Driver, hands: HandWorkers):
    live = submit(driver, limit=8)
    await turns()
    hands.crash(0, steps=3)
    await turns()
    assert not hands.running
    hands.recover(0)
    await turns()
    hands.finish(0)
    assert live.tokens == generate("hello", 8)


@with_driver()
async def test_a_request_that_kills_its_worker_alone_twice_fails_alone(
    driver: Driver, hands: HandWorkers
):
    poison = submit(driver, "poison")
    await turns()
    for _ in range(2):
        hands.crash(0)
        hands.recover(0)
        await turns()
    assert poison.status == "failed"
    assert "worker died" in poison.failure
    assert not hands.running


@with_driver()
async def test_out_of_memory_costs_no_request(driver: Driver, hands: HandWorkers):
    lives = [submit(driver, name, limit=8) for name in "abcd"]
    await turns()
    hands.finish(steps=3, failure="oom")
    while any(not live.status for live in lives):
        await turns()
        hands.finish()
    assert [live.tokens for live in lives] == [generate("hello", 8)] * 4
    assert [len(rows) for rows in hands.rows] == [4, 2, 2]
    assert driver.stats.oom_events == 1


@with_driver()
async def test_a_cancelled_waiting_request_is_removed_at_once(driver: Driver, hands: HandWorkers):
    submit(driver, "first", limit=100)
    await turns()
    live = submit(driver, "second")
    assert driver.waiting == 1
    driver.abort(live)
    driver.abort(live)
    assert (driver.waiting, driver.scheduler.jobs) == (0, 1)


@with_driver()
async def test_a_stop_string_ends_a_row_on_its_worker(driver: Driver, hands: HandWorkers):
    whole = bytes(generate("hello", 8)).decode()
    live = submit(driver, limit=100, stops=(whole[3:5],))
    await turns()
    hands.progress(steps=8)
    assert (live.unsent, len(live.tokens), live.status) == (whole[:3], 5, "stop")
    assert hands.unwanted == ["a"]
    hands.finish()
    await turns()
    assert not hands.running
    assert live.output.tokens == 5
    assert list(driver.scheduler._finished.recent) == [5]


@with_driver()
async def test_a_stop_string_in_the_last_tokens_ends_a_request(driver: Driver, hands: HandWorkers):
    whole = bytes(generate("hello", 8)).decode()
    live = submit(driver, limit=8, stops=(whole[3:5],))
    await turns()
    hands.finish()
    assert (live.status, live.tokens) == ("stop", generate("hello", 5))
    assert (driver.scheduler.jobs, list(driver.scheduler._finished.recent)) == (0, [5])


@with_driver()
async def test_the_scheduler_never_sees_the_length_of_a_replayed_request(
    driver: Driver, hands: HandWorkers
):
    live = submit(driver, limit=100, end_after=6)
    await turns()
    (batch,) = [worker.batch for worker in driver.scheduler.workers]
    (job,) = batch.jobs
    assert (job.prompt_tokens, job.max_new_tokens, job.priority) == (5, 100, 0)
    assert 6 not in [getattr(job, name) for name in Job.__slots__]
    assert batch.steps == 8
    hands.finish()
    assert (len(live.tokens), live.status, len(live.unsent)) == (6, "stop", 5)
    assert live.tokens[:5] == generate("hello", 5)


@with_driver(slice_tokens=8, eager=False, min_interval_s=0.02)
async def test_the_timer_wakes_a_policy_that_asked_for_it(driver: Driver, hands: HandWorkers):
    submit(driver, "first")
    await turns()
    submit(driver, "second")
    hands.finish()
    while not hands.running:  # both wait for the interval now
        await asyncio.sleep(0.001)
    assert [row.request_id for row in hands.running[0][1]] == ["second", "first"]


@in_a_loop
async def test_an_exception_of_the_scheduler_reaches_the_owner_of_the_driver():
    hands = HandWorkers()
    driver = make_driver(hands)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    await driver.start()
    driver.scheduler.policy = None
    submit(driver)
    await turns()
    assert isinstance(driver.error, AttributeError)
    assert driver.broke.is_set()
    await driver.stop()
