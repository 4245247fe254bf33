"""`llmctl set` on a server with workers of its own: parameters of its policy between two ticks."""

import asyncio

import httpx
import pytest
from said import says
from toy_server import HandWorkers, app_of, make_driver

from toolkit.errors import InputError
from toolkit.sched.policies import make_policy
from toolkit.serve.control import ROUTE
from toolkit.serve.driver import Driver
from toolkit.serve.own_control import PolicySettings, refuse_fixed, with_control

KEY = "a key of the control"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}


def driver_of(policy: str = "aggressive") -> Driver:
    parameters = {"watermark": 0.05} if policy == "aggressive" else {"slice_tokens": 8}
    return make_driver(HandWorkers(1), policy=policy, **parameters)


def ask(driver: Driver, method: str, fields=None, headers=AUTHORIZED, path: str = ROUTE):
    """The answer of the application behind its control, and what it said."""
    said: list[str] = []

    async def run() -> httpx.Response:
        app = with_control(app_of(driver), driver, KEY, said.append)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.request(method, path, json=fields, headers=headers)

    return asyncio.run(run()), said


def test_parameters_are_shown_and_changed():
    driver = driver_of()
    answer, _ = ask(driver, "GET")
    shown = {one["name"]: one for one in answer.json()["settings"]}
    assert shown["policy.watermark"]["value"] == 0.05
    answer, said = ask(driver, "POST", {"set": {"policy.watermark": 0.5}, "why": "a test"})
    assert (answer.status_code, answer.json()["changed"]) == (200, {"policy.watermark": 0.5})
    assert driver.scheduler.policy.watermark == 0.5
    assert says(said[0], "policy.watermark=0.5", "a test")


@pytest.mark.parametrize(
    "settings",
    [{"policy.watermark": 2.0}, {"policy.nothing": 1}, {"policy": "slice"}, {"max_num_seqs": 4}],
)
def test_a_wrong_value_changes_nothing(settings):
    driver = driver_of()
    before = driver.scheduler.policy
    answer, said = ask(driver, "POST", {"set": {"policy.watermark": 0.5} | settings})
    assert (answer.status_code, said) == (422, [])
    assert driver.scheduler.policy == before


def test_without_the_key_nothing_is_shown_and_the_rest_is_served():
    driver = driver_of()
    assert ask(driver, "GET", headers={})[0].status_code == 401
    assert ask(driver, "GET", headers={}, path="/v1/models")[0].status_code == 200


def test_a_lease_that_ends_gives_the_values_back():
    driver = driver_of()
    said: list[str] = []

    async def run() -> None:
        app = with_control(app_of(driver), driver, KEY, said.append)
        transport = httpx.ASGITransport(app=app)
        fields = {"set": {"policy.watermark": 0.5}, "owner": "a tuner", "lease_s": 0.01}
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await client.post(ROUTE, json=fields, headers=AUTHORIZED)
        while len(said) < 2:
            await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(run(), 10.0))
    assert driver.scheduler.policy.watermark == 0.05


@pytest.mark.parametrize("policy", ["slice", "mlfq"])
def test_a_policy_of_which_nothing_can_change_is_refused_by_name(policy):
    driver = driver_of()
    driver.scheduler.policy = make_policy(policy, {})
    with pytest.raises(InputError) as raised:
        refuse_fixed(driver.scheduler)
    assert says(raised.value.message, policy)


def test_several_parameters_are_one_call():
    driver = driver_of()
    calls: list[dict] = []
    usual = driver.configure
    driver.configure = lambda settings: (calls.append(dict(settings)), usual(settings))[1]
    settings = PolicySettings(driver)
    names = list(settings.values())
    changed = settings.apply({name: settings.values()[name] for name in names})
    assert (changed, calls) == ({}, [])
    settings.apply({"policy.watermark": 0.25})
    assert calls == [{"watermark": 0.25}]
