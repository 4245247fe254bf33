"""Live settings of several servers behind a front: of one, or of all, and never of half of them."""

import asyncio

import pytest
from said import says

from toolkit.endpoints.settings import LiveSetting, LiveState
from toolkit.errors import InputError
from toolkit.gateway import settings as module
from toolkit.gateway.settings import ReplicaSettings


class Servers:
    """In the place of `SettingsClient`: servers by URL, with bounds of their rows."""

    def __init__(self) -> None:
        self.rows = {"http://a": 8, "http://b": 8}
        self.most = {"http://a": 64, "http://b": 64}

    def __call__(self, url: str, key: str) -> "Client":
        assert key == "a key"
        return Client(self, url)


class Client:
    def __init__(self, servers: Servers, url: str) -> None:
        self._servers = servers
        self.url = url

    def get(self) -> LiveState:
        rows = self._servers.rows[self.url]
        most = self._servers.most[self.url]
        return LiveState([LiveSetting("max_num_seqs", rows, 8, 1, most)])

    def set(self, settings, why="") -> LiveState:
        rows = settings.get("max_num_seqs", self._servers.rows[self.url])
        if rows > self._servers.most[self.url]:
            raise InputError(f"{rows} is too many", "fewer")
        changed = {} if rows == self._servers.rows[self.url] else {"max_num_seqs": rows}
        self._servers.rows[self.url] = rows
        state = self.get()
        return LiveState(state.settings, changed=changed, word=why)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    made = Servers()
    monkeypatch.setattr(module, "SettingsClient", made)
    return made


@pytest.fixture
def shared(servers) -> ReplicaSettings:
    found = ReplicaSettings("a key")
    found.join("0", "http://a")
    found.join("1", "http://b")
    return found


def ask(shared: ReplicaSettings, **fields):
    return asyncio.run(shared.ask({}, fields))


def test_all_servers_get_a_change_or_none(servers, shared):
    answer = ask(shared, set={"max_num_seqs": 4}, why="a test")
    assert answer["changed"] == {"max_num_seqs": 4}
    assert answer["replicas"] == {"0": {"max_num_seqs": 4}, "1": {"max_num_seqs": 4}}
    assert answer["urls"] == {"0": "http://a", "1": "http://b"}
    servers.most["http://b"] = 16
    refused = ask(shared, set={"max_num_seqs": 32})
    assert (refused["status"], says(refused["error"], "replica 1", "32")) == (422, True)
    assert servers.rows == {"http://a": 4, "http://b": 4}


def test_one_server_has_its_trial_alone(servers, shared):
    answer = ask(shared, set={"max_num_seqs": 2}, replica="1")
    assert answer["settings"][0]["value"] == 2
    assert servers.rows == {"http://a": 8, "http://b": 2}
    assert ask(shared)["replicas"] == {"0": {"max_num_seqs": 8}, "1": {"max_num_seqs": 2}}


def test_a_server_that_starts_again_gets_what_all_have_and_no_trial(servers, shared):
    ask(shared, set={"max_num_seqs": 4})
    ask(shared, set={"max_num_seqs": 2}, replica="1")
    shared.leave("1")
    servers.rows["http://b"] = 8
    shared.join("1", "http://b")
    assert servers.rows == {"http://a": 4, "http://b": 4}
    shared.forget()
    shared.leave("0")
    servers.rows["http://a"] = 8
    shared.join("0", "http://a")
    assert servers.rows == {"http://a": 8, "http://b": 4}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"set": {"max_num_seqs": 4}, "replica": "7"}, 422),
        ({"set": 4}, 400),
        ({"set": None}, 400),
        ({"set": {"max_num_seqs": None}}, 400),
        ({"set": {"max_num_seqs": [4]}}, 400),
        ({"why": None}, 400),
        ({"owner": "a tuner", "lease_s": 60}, 400),
        ({"replica": 0}, 400),
    ],
)
def test_what_a_front_does_not_take_is_refused(servers, shared, fields, status):
    assert ask(shared, **fields)["status"] == status
    assert servers.rows == {"http://a": 8, "http://b": 8}


def test_without_a_server_there_is_nothing_to_set(servers):
    assert ask(ReplicaSettings("a key"))["status"] == 422
