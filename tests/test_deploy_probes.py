"""The rendered probes, run as a kubelet runs them, on a live server; its only worker is killed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orders
import pytest
import yaml

from benchmarks.common.serving import Server, fake_plan
from toolkit.deploy.render import render_target
from toolkit.files.io import write_file
from toolkit.files.tuning import Settings

GREEDY = {"model": "toy", "temperature": 0, "max_tokens": 200}


@dataclass
class Probe:
    """A probe as a kubelet counts it. Each `ask` stands for one period. The tests ask faster than
    that, which is only stricter.
    """

    data: dict[str, Any]
    failures: int = 0  # in a row
    most: int = 0  # failures in a row, so far

    def ask(self, url: str) -> bool:
        """Probe the server once. Whether the kubelet would still call it good: fewer failures in a
        row than the threshold.
        """
        answer = httpx.get(url + self.data["httpGet"]["path"], timeout=self.data["timeoutSeconds"])
        self.failures = 0 if 200 <= answer.status_code < 400 else self.failures + 1
        self.most = max(self.most, self.failures)
        return self.failures < self.data["failureThreshold"]


def probes(target: str, folder: Path) -> dict[str, Probe]:
    """The probes of the container that serves, by their keys in the manifest."""
    files = render_target(target, orders.order(orders.plan(folder)))
    pod = yaml.safe_load(files["base/deployment.yaml"])["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return {name: Probe(data) for name, data in container.items() if name.endswith("Probe")}


@pytest.mark.slow
def test_a_killed_worker_makes_the_pod_unready_but_not_restarted(tmp_path: Path) -> None:
    """While its only worker is loaded again, the pod gets no new requests, and answers those that
    it has.
    """
    import openai  # here: it takes half a second, and only slow tests need it

    found = probes("kubernetes", tmp_path)
    assert found.keys() == {"startupProbe", "readinessProbe", "livenessProbe"}
    ready = found["readinessProbe"]
    alive = found["livenessProbe"]
    policy = Settings(policy="slice", parameters={"slice_tokens": 16})
    plan = fake_plan(tmp_path, policy, eos_one_in=0, decode_s=0.004)
    write_file(orders.changed(plan, workers=1), tmp_path / "plan.json")
    with Server(tmp_path / "plan.json", "--served-model-name", "toy") as server:
        assert found["startupProbe"].ask(server.url)
        assert found["startupProbe"].failures == 0
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            expected = client.completions.create(prompt="hello", **GREEDY).choices[0].text
            stream = client.completions.create(prompt="hello", stream=True, **GREEDY)
            text = next(iter(stream)).choices[0].text
            (victim,) = server.workers()
            victim.kill()
            # Until the Service would leave the pod out.
            while ready.ask(server.url) or not ready.failures:
                assert alive.ask(server.url)
            while ready.failures:
                ready.ask(server.url)
                assert alive.ask(server.url)
            assert ready.most >= ready.data["failureThreshold"]
            assert alive.most == 0
            assert text + "".join(piece.choices[0].text for piece in stream) == expected
        assert server.end() == 0


def test_no_probe_fails_before_the_time_that_its_event_may_take(tmp_path: Path) -> None:
    def gives_up_s(probe: Probe) -> int:
        return probe.data["periodSeconds"] * probe.data["failureThreshold"]

    found = probes("kubernetes", tmp_path)
    assert gives_up_s(found["startupProbe"]) >= 1800, "a model loads in minutes"
    assert found["startupProbe"].data["httpGet"]["path"] == "/ready"
    assert found["livenessProbe"].data["httpGet"]["path"] == "/health"
    assert gives_up_s(found["livenessProbe"]) >= 30, "a front that is slow for a moment is not dead"
    assert gives_up_s(found["readinessProbe"]) <= 15, "a pod without a worker is soon left out"
