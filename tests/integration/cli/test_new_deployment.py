"""How a project of `onceward new` ships: its image, its CI and its manifests name commands that work, and the pages
and ports that these serve."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import yaml
from sqlalchemy import create_engine, text

from onceward.app.settings import AppSettings
from onceward.run.supervisor import HURRY_PATIENCE
from onceward.run.worker import PARTING
from tests.support.new_project import clean, do, new
from tests.support.processes import Start, processes
from tests.support.wait import until

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR"}
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
HEALTH = "0.0.0.0:8080"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as generated. Tests must not change it."""
    place = tmp_path_factory.mktemp("new") / "tea_shop"
    assert new("tea_shop", "--dir", place).exit_code == 0
    return place


@pytest.fixture
def project(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tea_shop"))


@pytest.fixture
def start() -> Iterator[Start]:
    with processes() as started:
        yield started


def instructions(file: Path) -> list[tuple[str, str]]:
    """Of a Dockerfile."""
    joined = re.sub(r"\\\n", "", file.read_text())
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def manifests(project: Path) -> list[dict[str, Any]]:
    return [each for file in project.glob("deploy/*.yaml") for each in yaml.safe_load_all(file.read_text())]


def named(project: Path, kind: str, name: str) -> dict[str, Any]:
    [found] = [
        each for each in manifests(project) if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    [found] = manifest["spec"]["template"]["spec"]["containers"]
    return dict(found)


def here(command: list[str]) -> list[str]:
    """A command of the image, in this environment."""
    program, *arguments = command
    return [sys.executable, *(arguments if program == "python" else ["-m", program, *arguments])]


# ── the image and CI ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("IN-18")
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.proven"])
def test_its_dockerfiles_have_instructions_that_there_are_and_copy_what_is_there(
    name: str, made: Path
) -> None:
    found = instructions(made / name)
    assert {each for each, _ in found} <= INSTRUCTIONS
    assert next(each for each, _ in found if each != "ARG") == "FROM"
    made_by_ci = {"evidence.json"}
    for source in [rest.split()[0] for each, rest in found if each == "COPY"]:
        assert (made / source).exists() or source in made_by_ci


@pytest.mark.req("IN-18")
def test_its_image_runs_the_workers_as_a_user_without_rights_and_leaves_secrets_out(made: Path) -> None:
    found = dict(instructions(made / "Dockerfile"))
    assert json.loads(found["CMD"])[:3] == ["onceward", "run", "tea_shop.app:app"]
    assert json.loads(found["CMD"])[-1] == f"0.0.0.0:{found['EXPOSE']}"
    assert int(found["USER"]) > 0
    assert {".env", "evidence.key", ".git/", "*.db"} <= set((made / ".dockerignore").read_text().split())


def workflow(project: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((project / ".github/workflows/ci.yml").read_text()))


def runs(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.req("IN-18")
def test_its_ci_tests_every_change_and_then_proves_the_image_that_ships(made: Path) -> None:
    found = workflow(made)
    assert set(found[True]) == {"push", "pull_request"}, "YAML reads `on` as true"
    jobs = found["jobs"]
    for job in jobs.values():
        assert job["runs-on"]
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    assert runs(jobs["test"]) == ["make test"]
    assert jobs["prove"]["needs"] == "test"
    [database] = [step["env"]["ONCEWARD_DATABASE"] for step in jobs["prove"]["steps"] if "env" in step]
    assert database.startswith("postgresql://")
    assert "postgres" in jobs["prove"]["services"]
    build, verify, ship = runs(jobs["prove"])
    assert (build.split()[:2], ship.split()[:4]) == (
        ["docker", "build"],
        ["docker", "build", "--file", "Dockerfile.proven"],
    )
    assert "onceward verify tea_shop.app:app --all --out /out/evidence.json" in verify
    base = re.search(r"VERIFIED=(\S+)", (made / "Dockerfile.proven").read_text())
    assert base is not None
    assert base[1] == f"{jobs['prove']['env']['IMAGE']}:unproven"


@pytest.mark.req("IN-18")
def test_what_ci_verifies_runs_in_production_with_the_evidence_in_its_image(project: Path) -> None:
    verify = runs(workflow(project)["jobs"]["prove"])[1]
    command = shlex.split(verify[verify.index("onceward verify") :].replace("/out/", ""))
    do(project, *here(command))
    do(project, *here(["python", "-m", "tea_shop.migrate"]))
    image = dict(
        rest.split("=") for each, rest in instructions(project / "Dockerfile.proven") if each == "ENV"
    )
    image["ONCEWARD_EVIDENCE"] = image["ONCEWARD_EVIDENCE"].replace("/app/", "")
    do(project, *here(["onceward", "run", "tea_shop.app:app", "--drain"]), **image)
    (project / "evidence.json").unlink()
    with pytest.raises(AssertionError, match=r"evidence\.json"):
        do(project, *here(["onceward", "run", "tea_shop.app:app", "--drain"]), **image)


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.req("IN-19")
def test_its_manifests_have_what_kubernetes_requires(made: Path) -> None:
    found = manifests(made)
    assert [each["kind"] for each in found].count("Deployment") == 2
    for each in found:
        assert each["apiVersion"]
        assert DNS_NAME.fullmatch(each["metadata"]["name"])
    for each in found:
        if each["kind"] not in ("Deployment", "Job"):
            continue
        assert DNS_NAME.fullmatch(container(each)["name"])
        assert container(each)["image"] == "tea-shop:latest"
        assert container(each)["envFrom"] == [{"secretRef": {"name": "tea-shop"}}]
        if each["kind"] == "Deployment":
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert each["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert "memory" in container(each)["resources"]["limits"]
    assert named(made, "Job", "tea-shop-migrate")["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.req("IN-19")
def test_its_service_and_its_autoscaler_find_what_they_are_for(made: Path) -> None:
    web, workers = (named(made, "Deployment", f"tea-shop-{part}") for part in ("web", "workers"))
    service = named(made, "Service", "tea-shop-web")["spec"]
    assert service["selector"].items() <= web["spec"]["template"]["metadata"]["labels"].items()
    [port] = service["ports"]
    assert port["targetPort"] in [each["name"] for each in container(web)["ports"]]
    scaled = named(made, "ScaledObject", "tea-shop-workers")["spec"]
    assert scaled["scaleTargetRef"]["name"] == workers["metadata"]["name"]
    assert scaled["minReplicaCount"] >= 1, "with no pod, nothing samples the source"


@pytest.mark.req("IN-19")
def test_kubernetes_waits_longer_than_a_stop_takes(made: Path) -> None:
    waits = named(made, "Deployment", "tea-shop-workers")["spec"]["template"]["spec"]
    slowest = AppSettings().grace + HURRY_PATIENCE + PARTING
    assert waits["terminationGracePeriodSeconds"] > slowest + 5


@pytest.mark.req("IN-17", "IN-19")
def test_after_the_job_the_web_service_takes_an_order_and_the_workers_charge_it_and_the_probes_succeed(
    project: Path, start: Start
) -> None:
    do(project, *here(container(named(project, "Job", "tea-shop-migrate"))["command"]))
    web = container(named(project, "Deployment", "tea-shop-web"))
    workers = container(named(project, "Deployment", "tea-shop-workers"))
    assert workers["ports"] == [{"name": "health", "containerPort": int(HEALTH.rpartition(":")[2])}]
    [port] = web["ports"]
    assert str(port["containerPort"]) in web["command"]

    command = [each.replace("0.0.0.0", "127.0.0.1") for each in web["command"]]
    command[command.index(str(port["containerPort"]))] = "0"
    shop = address(start, project, command, r"running on (http://[\d.:]+)")
    order = json.dumps({"customer": "anna", "cents": 100}).encode()
    request = Request(f"{shop}/orders", order, {"Content-Type": "application/json"})
    with urlopen(request) as answer:
        placed = json.load(answer)
    check_probes(web, shop)

    command = [each.replace(HEALTH, "127.0.0.1:0") for each in workers["command"]]
    assert command != workers["command"]
    check_probes(workers, address(start, project, command, r"health at (http://[\d.:]+)"))
    until(lambda: charged(project) == [placed["id"]])


def address(start: Start, project: Path, command: list[str], pattern: str) -> str:
    """Start a command of the image, and return the address that it says it serves."""
    running = start(here(command), cwd=project, env=clean(), stderr=subprocess.STDOUT)
    assert running.stdout is not None
    for line in running.stdout:
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"{command} serves nothing")


def check_probes(of: dict[str, Any], url: str) -> None:
    probes = [probe["httpGet"] for name, probe in of.items() if name.endswith("Probe")]
    assert len(probes) >= 2
    assert {probe["port"] for probe in probes} == {each["name"] for each in of["ports"]}
    for probe in probes:
        until(succeeds(f"{url}{probe['path']}"), what=probe["path"])


def succeeds(url: str) -> Callable[[], bool]:
    def ask() -> bool:
        try:
            with urlopen(url) as answer:
                return bool(answer.status == 200)
        except HTTPError as error:
            if error.code != 503:  # there is no such page
                raise
            return False

    return ask


def charged(project: Path) -> list[Any]:
    engine = create_engine(f"sqlite:///{project}/tea_shop.db")
    try:
        with engine.connect() as connection:
            return list(connection.scalars(text("SELECT order_id FROM charges")))
    finally:
        engine.dispose()
