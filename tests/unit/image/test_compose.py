"""What a person relies on in the Compose files without reading them: nothing is reachable, nothing has a privilege."""

import ipaddress
import json
import os
import re

import pytest
import yaml

from sparkforge import pins
from sparkforge.core.paths import ROOT
from sparkforge.image import compose

VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")
SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
TABLE = pins.load()
STACKS = [name for name, stack in TABLE.stacks.items() if stack.image]
DEVELOPMENT = ("docker-compose.yml", "docker-compose.dev.yml")
# What a user can bring up: the services of each stack, and the development ones.
DEVICES = {
    **dict.fromkeys(STACKS, (compose.FILE,)),
    "dev": DEVELOPMENT,
    "dev-cpu": (*DEVELOPMENT, "docker-compose.dev.cpu.yml"),
}
# A developer compiles in these, as a user without privileges, and nobody else is served by them.
DEVELOPERS = {"dev", "serve"}


class Reset(list):
    """Compose's `!reset`: the value replaces what an earlier file has."""


class Loader(yaml.SafeLoader):
    """YAML with Compose's own tag."""


Loader.add_constructor("!reset", lambda loader, node: Reset(loader.construct_sequence(node)))


def expand(value, environment):
    """Replace ${NAME:-default} as Compose does, everywhere in a document."""
    if isinstance(value, dict):
        return {key: expand(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return type(value)(expand(item, environment) for item in value)
    if isinstance(value, str):
        return VARIABLE.sub(lambda match: environment.get(match[1]) or match[2] or "", value)
    return value


def merge(first, second):
    """Lay one file over another as Compose does: a command is replaced, other lists are joined."""
    merged = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(first.get(key), dict):
            merged[key] = merge(first[key], value)
        elif isinstance(value, list) and not isinstance(value, Reset) and key in first and key != "command":
            merged[key] = [*first[key], *value]
        else:
            merged[key] = value
    return merged


def read(file, environment):
    return expand(yaml.load((ROOT / file).read_text(encoding="utf-8"), Loader), environment)  # noqa: S506 - a SafeLoader


def resolve(name, **environment):
    environment = {**({"SPARKFORGE_STACK": name} if name in STACKS else {}), **environment}
    document = {}
    for file in DEVICES[name]:
        document = merge(document, read(file, environment))
    for service, content in document["services"].items():
        if extended := content.pop("extends", None):
            base = read(extended["file"], environment)["services"][extended["service"]]
            document["services"][service] = merge(base, content)
    return document


SERVICES = [(device, service) for device in DEVICES for service in resolve(device)["services"]]


@pytest.mark.parametrize(("device", "name"), SERVICES)
def test_no_service_has_a_privilege_or_is_reachable_from_elsewhere(device, name):
    service = resolve(device)["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"network_mode", "ipc", "pid", "privileged", "userns_mode", "cap_add", "devices"} & set(service)
    assert service["networks"] == ["sparkforge"]
    for port in service.get("ports", []):
        assert ipaddress.ip_address(port.split(":")[0]).is_loopback
    user, group = map(int, service["user"].split(":"))
    assert user > 0
    assert group >= 0
    assert service.get("read_only") or name in DEVELOPERS
    limits = service["deploy"]["resources"]["limits"]
    assert limits["memory"]
    assert limits["pids"] <= (8192 if name in DEVELOPERS else 4096)
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()
    assert "@sha256:" in service["image"] or service["image"].startswith("sparkforge/vllm:")
    assert service["restart"] != "always"


@pytest.mark.parametrize(("device", "name"), SERVICES)
def test_secrets_are_files_and_models_are_not_written(device, name):
    document = resolve(device)
    service = document["services"][name]
    secret = {key for key in service.get("environment", {}) if SECRET.search(key) and key != "BENCH_TOKENIZER"}
    assert not secret
    for mounted in service.get("secrets", []):
        source = mounted if isinstance(mounted, str) else mounted["source"]
        assert document["secrets"][source]["file"] == os.devnull  # a fresh clone needs none
    for volume in service.get("volumes", []):
        if isinstance(volume, dict) and volume["target"] == "/models":
            assert volume["read_only"] is True


def test_the_server_on_a_spark():
    document = resolve("spark")
    server = document["services"]["vllm"]
    assert document["name"] == compose.PROJECT
    assert server["ports"] == ["127.0.0.1:8000:8000"]
    assert resolve("spark", PORT="8001")["services"]["vllm"]["ports"] == ["127.0.0.1:8001:8000"]
    (gpu,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (gpu["driver"], gpu["count"]) == ("nvidia", "1")  # Compose reads a digit as a number
    assert server["environment"]["SPARKFORGE_VALIDATE"] == "strict"
    assert server["restart"].startswith("on-failure:")  # a failed validation is not tried for ever
    assert int(server["stop_grace_period"].removesuffix("s")) > 45  # --shutdown-timeout of every profile
    assert server["healthcheck"]["test"][-2:] == ["-m", "sparkforge.serve.health"]
    assert "cache:/var/cache/sparkforge" in server["volumes"]  # compiled code outlives the container
    assert document["volumes"]["run"]["driver_opts"]["type"] == "tmpfs"


@pytest.mark.parametrize("device", ["embedded", "dev-cpu"])
def test_a_machine_without_a_gpu_reserves_none(device):
    for name in {"embedded": ["vllm"], "dev-cpu": ["dev", "serve"]}[device]:
        service = resolve(device)["services"][name]
        assert not service["deploy"]["resources"].get("reservations", {}).get("devices")
        assert service["build"]["args"]["STACK"] == "embedded"
        assert service["environment"]["SPARKFORGE_PROFILE"] == "embedded"


@pytest.mark.parametrize("stack", STACKS)
def test_each_stack_has_a_service_with_its_own_image_and_a_load_that_fits_it(stack):
    services = resolve(stack)["services"]
    server, load = services["vllm"], services["bench"]
    assert server["image"] == load["image"] == f"sparkforge/vllm:{stack}"
    assert server["environment"]["SPARKFORGE_STACK"] == stack
    assert server["build"]["args"]["STACK"] == stack
    assert load["command"]
    with_gpu = "devices" in server["deploy"]["resources"].get("reservations", {})
    assert with_gpu == (TABLE.image(stack).device != "cpu")


@pytest.mark.parametrize("stack", STACKS)
def test_the_competitions_variables_reach_the_benchmark_and_the_server(stack):
    given = {"MODEL": "openai/gpt-oss-120b", "BENCH_MODEL": "mine", "TP": "2", "ISL": "8192", "OSL": "512",
             "CONC": "16", "MAX_MODEL_LEN": "16384", "RANDOM_RANGE_RATIO": "0.5", "NUM_PROMPTS": "7",
             "RESULT_FILENAME": "result"}  # fmt: skip
    services = resolve(stack, **given)["services"]
    load = services["bench"]["environment"]
    assert {name: load.get(name) for name in given} == given
    assert "PORT" not in load  # the port on the host
    server = services["vllm"]["environment"]
    assert (server["SPARKFORGE_TP"], server["SPARKFORGE_MAX_MODEL_LEN"]) == ("2", "16384")
    for gpu in services["vllm"]["deploy"]["resources"].get("reservations", {}).get("devices", []):
        assert gpu["count"] == "2"


@pytest.mark.parametrize("stack", STACKS)
def test_the_benchmark_in_compose_runs_the_gate(stack):
    load = resolve(stack)["services"]["bench"]
    assert load["command"] == ["perf"]  # of sparkforge.bench: the gate, then the load
    assert load["entrypoint"][-1] == "/opt/sparkforge/deploy/bench"
    script = (ROOT / "deploy/bench").read_text(encoding="utf-8").splitlines()[-1]
    assert script == 'exec /opt/venv/bin/python -m sparkforge.bench "$@"'


def test_the_default_stack_serves_where_none_is_named():
    services = read(compose.FILE, {})["services"]
    assert services["vllm"]["extends"] == {"file": "deploy/stacks.yml", "service": TABLE.default}
    assert services["vllm"]["environment"]["SPARKFORGE_STACK"] == TABLE.default


@pytest.mark.parametrize(("device", "name"), [("spark", "vllm"), ("embedded", "vllm"), ("dev", "serve")])
def test_a_server_answers_to_known_names_and_another_key_file_makes_another_container(device, name):
    server = resolve(device)["services"][name]
    assert server["environment"]["SPARKFORGE_ALLOWED_HOSTS"] == f"{name},"
    named = resolve(device, SPARKFORGE_API_KEY="/key", SPARKFORGE_ALLOWED_HOSTS="spark.local")
    assert named["secrets"]["api_key"]["file"] == "/key"
    assert "api_key" in server["secrets"]
    assert named["services"][name]["labels"] != server["labels"]
    assert named["services"][name]["environment"]["SPARKFORGE_ALLOWED_HOSTS"] == f"{name},spark.local"


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_server_starts_by_itself(device):
    services = resolve(device)["services"]
    assert {name for name, service in services.items() if not service.get("profiles")} <= {"vllm", "dev"}


def test_the_dashboard_asks_its_own_data_source_only():
    board = json.loads((ROOT / "deploy/grafana/dashboards/vllm.json").read_text(encoding="utf-8"))
    provisioned = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    (source,) = yaml.safe_load(provisioned)["datasources"]
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])


def test_prometheus_reads_the_services_that_compose_names():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    static = [entry for job in config["scrape_configs"] for entry in job["static_configs"]]
    hosts = {target.partition(":")[0] for entry in static for target in entry["targets"]}
    assert hosts <= resolve("spark")["services"].keys()
