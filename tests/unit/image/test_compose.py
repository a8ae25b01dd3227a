"""Guarantees of the Compose files: nothing is reachable from elsewhere, and no service has privileges."""

import ipaddress
import os
import re

import pytest
import yaml

from sparkforge import pins
from sparkforge.cli.build import chosen_jobs
from sparkforge.core.paths import ROOT
from sparkforge.image import compose, dev
from sparkforge.models import local
from sparkforge.plan import devices as plan_devices
from sparkforge.plan import thresholds
from sparkforge.plan.budget import HOST_WORKING_BYTES
from sparkforge.serve import profiles

VARIABLE = re.compile(r"\$\{(\w+)(?::?([-+])([^${}]*))?\}")
SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
TABLE = pins.load()
STACKS = [name for name, stack in TABLE.stacks.items() if stack.image]
DEVELOPMENT = ("docker-compose.dev.yml",)
# The services that a user can start: those of each stack, and the development services.
DEVICES = {
    **dict.fromkeys(STACKS, (compose.FILE,)),
    "dev": DEVELOPMENT,
    "dev-cpu": (*DEVELOPMENT, "docker-compose.dev.cpu.yml"),
}
# A developer compiles in these as an unprivileged user; they serve nobody else.
DEVELOPERS = {"dev", "serve"}


class Reset(list):
    """Compose's `!reset`: the value replaces that of an earlier file."""


class Loader(yaml.SafeLoader):
    """A YAML loader with Compose's own tag."""


Loader.add_constructor("!reset", lambda loader, node: Reset(loader.construct_sequence(node)))


def expand(value, environment):
    """Replace ${NAME:-default} and ${NAME:+instead} as Compose does, everywhere in a document."""

    def replace(match):
        value = environment.get(match[1])
        return (match[3] if value else "") if match[2] == "+" else value or match[3] or ""

    if isinstance(value, dict):
        return {key: expand(item, environment) for key, item in value.items()}
    if isinstance(value, list):
        return type(value)(expand(item, environment) for item in value)
    if isinstance(value, str):
        while VARIABLE.search(value):  # a default can have a variable of its own
            value = VARIABLE.sub(replace, value)
    return value


def merge(first, second):
    """Merge two files as Compose does: a command is replaced, other lists are joined."""
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


def resolve(name, *more, **environment):
    environment = {**({"SPARKFORGE_STACK": name} if name in STACKS else {}), **environment}
    document = {}
    for file in (*DEVICES[name], *more):
        document = merge(document, read(file, environment))
    for service, content in document["services"].items():
        if extended := content.pop("extends", None):
            base = read(extended["file"], environment)["services"][extended["service"]]
            document["services"][service] = merge(base, content)
    return document


SERVICES = [(device, service) for device in DEVICES for service in resolve(device)["services"]]


def published(server):
    """Return ADDRESS:PORT of a service's only published port."""
    (port,) = server["ports"]
    return f"{port['host_ip']}:{port['published']}"


@pytest.mark.parametrize(("device", "name"), SERVICES)
def test_no_service_has_a_privilege_is_reachable_from_elsewhere_or_writes_models(device, name):
    document = resolve(device)
    service = document["services"][name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"network_mode", "ipc", "pid", "privileged", "userns_mode", "cap_add", "devices"} & set(service)
    assert service["networks"] == ["sparkforge"]
    for port in service.get("ports", []):
        address = port.split(":")[0] if isinstance(port, str) else port["host_ip"]
        assert ipaddress.ip_address(address).is_loopback
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
    assert not {key for key in service.get("environment", {}) if SECRET.search(key)}  # secrets are files
    for mounted in service.get("secrets", []):
        source = mounted if isinstance(mounted, str) else mounted["source"]
        assert document["secrets"][source]["file"] == os.devnull  # a fresh clone needs no secret
    for volume in service.get("volumes", []):
        assert not isinstance(volume, dict) or volume["target"] != "/models" or volume["read_only"] is True
    assert service.get("profiles") or name in {"vllm", "dev"}  # only these start without a profile


def test_the_server_on_a_spark():
    document = resolve("spark")
    server = document["services"]["vllm"]
    assert document["name"] == compose.PROJECT
    assert published(server) == "127.0.0.1:8000"
    assert published(resolve("spark", PORT="8001")["services"]["vllm"]) == "127.0.0.1:8001"
    (gpu,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (gpu["driver"], gpu["count"]) == ("nvidia", "1")  # Compose converts a string of digits to a number
    assert server["environment"]["SPARKFORGE_VALIDATE"] == "strict"
    assert server["restart"].startswith("on-failure:")  # a failed validation is not retried forever
    assert int(server["stop_grace_period"].removesuffix("s")) > 45  # --shutdown-timeout of every profile
    assert server["healthcheck"]["test"][-2:] == ["-m", "sparkforge.serve.health"]
    assert "cache:/var/cache/sparkforge" in server["volumes"]  # compiled code outlives the container
    assert document["volumes"]["run"]["driver_opts"]["type"] == "tmpfs"


@pytest.mark.parametrize("stack", STACKS)
def test_the_number_of_compilers_reaches_the_build_by_compose_and_by_inv(stack, monkeypatch):
    for values, jobs in ((("", "", ""), "auto"), (("4", "3", "2"), "4")):
        environment = dict(zip(("BUILD_JOBS", "JOBS", "MAX_JOBS"), values, strict=True))
        assert resolve(stack, **environment)["services"]["vllm"]["build"]["args"]["JOBS"] == jobs
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert (chosen_jobs("auto"), chosen_jobs("7")) == (jobs, "7")


def in_bytes(text):
    return int(text[:-1]) << {"g": 30, "m": 20}[text[-1]]


@pytest.mark.parametrize("stack", STACKS)
def test_no_service_swaps_and_memory_on_tmpfs_fits_the_limit_that_counts_it(stack):
    services = resolve(stack)["services"]
    for name, service in services.items():
        assert service["memswap_limit"] == service["deploy"]["resources"]["limits"]["memory"], name
    server = services["vllm"]
    (folder,) = server["tmpfs"]
    in_memory = in_bytes(folder.rpartition("size=")[2]) + in_bytes(server["shm_size"])
    limit = in_bytes(server["deploy"]["resources"]["limits"]["memory"])
    assert HOST_WORKING_BYTES + in_memory <= limit
    raised = resolve(stack, SPARKFORGE_MEMORY="12g")["services"]["vllm"]
    assert raised["memswap_limit"] == raised["deploy"]["resources"]["limits"]["memory"] == "12g"


@pytest.mark.parametrize("stack", [stack for stack in STACKS if TABLE.image(stack).device != "cpu"])
def test_all_limits_together_leave_a_spark_what_the_guard_keeps_free(stack):
    spark = plan_devices.named("spark")
    limits = [service["deploy"]["resources"]["limits"]["memory"] for service in resolve(stack)["services"].values()]
    beside = sum(map(in_bytes, limits)) + int(spark.resident.value * plan_devices.GIB)
    guard, left = thresholds.load(), {}
    for name in spark.profiles:
        share = float(profiles.named(name, stack=stack).flags["--gpu-memory-utilization"].value)
        left[name] = spark.memory_bytes - int(share * spark.memory_bytes) - beside
    assert min(left.values()) > guard.end_below(spark.memory_bytes), left


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
    environment = {"MODEL": "openai/gpt-oss-120b", "BENCH_MODEL": "mine", "TP": "2", "ISL": "8192", "OSL": "512",
             "CONC": "16", "MAX_MODEL_LEN": "16384", "RANDOM_RANGE_RATIO": "0.5", "NUM_PROMPTS": "7",
             "RESULT_FILENAME": "result"}  # fmt: skip
    services = resolve(stack, **environment)["services"]
    load = services["bench"]["environment"]
    assert {name: load.get(name) for name in environment} == environment
    assert "PORT" not in load  # the port on the host
    server = services["vllm"]["environment"]
    assert (server["SPARKFORGE_TP"], server["SPARKFORGE_MAX_MODEL_LEN"]) == ("2", "16384")
    for gpu in services["vllm"]["deploy"]["resources"].get("reservations", {}).get("devices", []):
        assert gpu["count"] == "2"


@pytest.mark.parametrize(("device", "name"), [("spark", "vllm"), ("embedded", "vllm"), ("dev", "serve")])
def test_a_server_answers_to_known_names_and_another_key_file_makes_another_container(device, name):
    server = resolve(device)["services"][name]
    assert server["environment"]["SPARKFORGE_ALLOWED_HOSTS"] == f"{name},"
    named = resolve(device, SPARKFORGE_API_KEY="/key", SPARKFORGE_ALLOWED_HOSTS="spark.local")
    assert named["secrets"]["api_key"]["file"] == "/key"
    assert "api_key" in server["secrets"]
    assert named["services"][name]["labels"] != server["labels"]
    assert named["services"][name]["environment"]["SPARKFORGE_ALLOWED_HOSTS"] == f"{name},spark.local"


@pytest.mark.parametrize("stack", STACKS)
def test_settings_reach_the_server_without_an_override_file(stack):
    environment = {"VLLM_ARGS": "--max-num-seqs 8", "SPARKFORGE_BIND": "10.0.0.1", "SPARKFORGE_MODEL": "me/mine"}
    server = resolve(stack, **environment)["services"]["vllm"]
    assert {name: server["environment"][name] for name in environment} == environment
    assert published(server) == "10.0.0.1:8000"
    # Without a value: Compose sets them in the container only if they are set in its own environment.
    passed = {name for name, value in server["environment"].items() if value is None}
    flashinfer = {"FLASHINFER_LOGLEVEL", "FLASHINFER_JIT_VERBOSE", "FLASHINFER_JIT_DEBUG"}
    assert passed >= {"SPARKFORGE_VALIDATE_SECONDS", "MAX_JOBS", "FLASHINFER_NVCC_THREADS", *flashinfer}
    assert server["env_file"] == [{"path": "vllm.env", "required": False}]


@pytest.mark.parametrize("stack", STACKS)
def test_models_and_the_cache_are_mounted_as_they_are_and_no_folder_is_made(stack):
    def mounted(**variables):
        volumes = resolve(stack, **variables)["services"]["vllm"]["volumes"]
        volumes = [volume for volume in volumes if isinstance(volume, dict)]
        assert all(volume["read_only"] for volume in volumes)
        assert not any(volume["bind"]["create_host_path"] for volume in volumes)  # Docker would make it as root
        return {volume["target"]: volume["source"] for volume in volumes}

    hub = f"{local.MOUNTED}/hub"  # the parent folder has a token
    assert mounted() == {"/models": "./models", hub: "./models"}
    assert mounted(HF_HOME="/cache", SPARKFORGE_MODELS="/m") == {"/models": "/m", hub: "/cache/hub"}
    assert mounted(HF_HOME="/cache", HF_HUB_CACHE="/other")[hub] == "/other"
    assert (ROOT / "models").is_dir()  # in a fresh clone


def test_prometheus_has_the_key_only_where_metrics_need_it():
    for metrics, file in (("", "/my/key"), ("open", os.devnull)):
        document = resolve("spark", SPARKFORGE_METRICS=metrics, SPARKFORGE_API_KEY="/my/key")
        (secret,) = document["services"]["prometheus"]["secrets"]
        assert document["secrets"][secret["source"]]["file"] == file
    scrape, _ = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert scrape["authorization"]["credentials_file"] == secret["target"]


@pytest.mark.parametrize("device", ["dev", "dev-cpu"])
def test_the_development_file_is_whole_and_starts_one_server(device):
    document = resolve(device)
    assert document["name"] != compose.PROJECT, "`down` of one project does not end the other's containers"
    services = document["services"]
    assert {name for name, service in services.items() if service.get("ports")} == {"serve"}
    assert services["serve"]["profiles"] == ["serve"]
    used = {network for service in services.values() for network in service["networks"]}
    assert used <= set(document["networks"])
    secrets = {secret for service in services.values() for secret in service.get("secrets", [])}
    assert secrets <= set(document["secrets"])
    named = resolve(device, **{checkout.variable: f"/my/{checkout.name}" for checkout in dev.CHECKOUTS})
    volumes = [volume for volume in named["services"]["dev"]["volumes"] if isinstance(volume, dict)]
    mounted = {volume["target"]: volume["source"] for volume in volumes}
    assert all(mounted[f"/src/{checkout.name}"] == f"/my/{checkout.name}" for checkout in dev.CHECKOUTS)


LOOSENED = {
    "network_mode": "host", "networks": [], "ports": [], "devices": ["/dev/infiniband:/dev/infiniband"],
    "ulimits": {"memlock": -1}, "restart": "no",
}  # fmt: skip


@pytest.mark.parametrize("stack", [stack for stack in STACKS if TABLE.image(stack).device != "cpu"])
def test_a_node_of_a_cluster_loosens_these_keys_of_the_server_and_nothing_else(stack):
    alone, node = resolve(stack), resolve(stack, compose.CLUSTER)
    server = node["services"].pop("vllm")
    expected = {**alone["services"].pop("vllm"), **LOOSENED}
    environment = server.pop("environment")
    own = {name: value for name, value in environment.items() if name not in expected["environment"]}
    assert own.pop("SPARKFORGE_COMPOSE_FILE_2") == compose.CLUSTER  # the file's name, for the advice in errors
    assert {name: environment[name] for name in expected["environment"]} == expected.pop("environment")
    assert server == expected
    assert node == alone
    assert all(name.startswith(("NCCL_", "GLOO_", "SPARKFORGE_CLUSTER_")) or name == "VLLM_HOST_IP" for name in own)
    assert {value for name, value in own.items() if not name.startswith("NCCL_DEBUG")} == {None}  # only if set
