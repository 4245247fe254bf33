"""The Dockerfile that makes the images which deployments name."""

import re
import tomllib
from pathlib import Path

import orders
import pytest
from operator_kinds import POD_SECURITY
from rendered import services

import toolkit
from toolkit.deploy.values import Values
from toolkit.engine_traits import ENGINES

ROOT = Path(toolkit.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_it_starts_from_a_pinned_version_and_runs_as_the_user_of_the_deployments(
    tmp_path: Path,
) -> None:
    (base,) = re.findall(r"^FROM (.+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.[0-9]+-slim-[a-z]+@sha256:[0-9a-f]{64}", base)
    (user,) = re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)
    assert user == f"{POD_SECURITY['runAsUser']}:{POD_SECURITY['runAsGroup']}"
    order = orders.order(orders.plan(tmp_path))
    assert {one["user"] for one in services(order).values()} == {user}


def test_all_copied_files_exist_and_are_not_ignored() -> None:
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        word
        for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE)
        for word in line.split()
    ]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in ignore
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel["force-include"]) <= set(copied)


def test_every_extra_of_an_image_is_one_of_the_package() -> None:
    needed = {traits.extra for traits in ENGINES.values()} - {""}
    assert needed <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize(
    ("engine", "image", "argument"),
    [
        ("transformers", "llmctl:{}", ""),
        ("deepspeed", "llmctl:{}-deepspeed", " --build-arg 'EXTRAS=[deepspeed]'"),
    ],
)
def test_an_image_has_what_the_engine_needs(
    tmp_path: Path, engine: str, image: str, argument: str
) -> None:
    order = orders.order(orders.plan(tmp_path, engine={"name": engine}))
    found = Values(order, front=False, cluster=False).image
    name = image.format(toolkit.__version__)
    assert found.value == name
    assert found.source.endswith(f"docker build -t {name}{argument} .")
