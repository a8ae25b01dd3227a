"""The contract of docker-compose.yml, line by line: what a person relies on without reading it."""

import json
import re

import pytest
import yaml

from serve import profiles
from sparkforge.paths import ROOT

DIGEST = re.compile(r"@sha256:[0-9a-f]{64}(\})?$")
OURS = re.compile(r"sparkforge/vllm:(spark|embedded|dev)$")


class Loader(yaml.SafeLoader):
    """Compose's own tags: `!reset` and `!override` before a value."""


Loader.add_multi_constructor("!", lambda loader, tag, node: loader.construct_sequence(node))


def read(name):
    return yaml.load((ROOT / name).read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader


FILE = read("docker-compose.yml")
SERVICES = FILE["services"]
SERVER = SERVICES["vllm"]
HARDENED = {
    "every capability is dropped": lambda service: service["cap_drop"] == ["ALL"],
    "no new privileges": lambda service: service["security_opt"] == ["no-new-privileges:true"],
    "the root file system is read-only": lambda service: service["read_only"] is True,
    "a numeric user, not root": lambda service: re.fullmatch(r"[1-9]\d*:\d+", service["user"]),
    "memory is limited": lambda service: service["deploy"]["resources"]["limits"]["memory"],
    "processes are limited": lambda service: service["deploy"]["resources"]["limits"]["pids"] <= 4096,
    "logs are rotated": lambda service: set(service["logging"]["options"]) == {"max-size", "max-file"},
    "a bridge network of its own": lambda service: service["networks"] == ["sparkforge"],
    "no host namespace": lambda service: not {"network_mode", "ipc", "pid", "privileged", "userns_mode"} & set(service),
    "no added capability or device": lambda service: not {"cap_add", "devices"} & set(service),
    "published on the loopback address only": lambda service: all(
        port.startswith("127.0.0.1:") for port in service.get("ports", [])
    ),
    "the image is ours or pinned by digest": lambda service: (
        OURS.search(service["image"]) or DIGEST.search(service["image"])
    ),
    "it ends: no restart without an end for what can be refused": lambda service: "restart" in service,
}
SERVING = {
    "port 8000 unless PORT says otherwise": lambda: SERVER["ports"] == ["127.0.0.1:${PORT:-8000}:8000"],
    "one GPU is reserved": lambda: (
        SERVER["deploy"]["resources"]["reservations"]["devices"]
        == [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    ),
    "shared memory of its own": lambda: SERVER["shm_size"] == "${SPARKFORGE_SHM:-8g}",
    "the model is mounted read-only": lambda: SERVER["volumes"][0]["read_only"] is True,
    "compiled code is kept on a volume": lambda: "cache:/var/cache/sparkforge" in SERVER["volumes"],
    "the report's folder is memory": lambda: FILE["volumes"]["run"]["driver_opts"]["type"] == "tmpfs",
    "/tmp is memory": lambda: SERVER["tmpfs"] == ["/tmp:mode=1777,size=4g"],
    "healthy means validated and answering": lambda: SERVER["healthcheck"]["test"][-1] == "serve.healthy",
    "it has time to load": lambda: SERVER["healthcheck"]["start_period"] == "${SPARKFORGE_START_PERIOD:-30m}",
    "a failed validation is not tried for ever": lambda: SERVER["restart"] == "${SPARKFORGE_RESTART:-on-failure:3}",
    "requests may end at SIGTERM": lambda: SERVER["stop_grace_period"] == "60s",
    "secrets are files": lambda: SERVER["secrets"] == ["api_key", "hf_token"],
    "and a fresh clone needs none": lambda: all(
        one["file"].endswith(":-/dev/null}") for one in FILE["secrets"].values()
    ),
    "validation is strict": lambda: SERVER["environment"]["SPARKFORGE_VALIDATE"] == "${SPARKFORGE_VALIDATE:-strict}",
    "no secret in a variable": lambda: not [name for name in SERVER["environment"] if re.search("KEY|TOKEN", name)],
    "the project's name is fixed": lambda: FILE["name"] == "sparkforge",
}


@pytest.mark.parametrize("line", HARDENED)
@pytest.mark.parametrize("service", SERVICES)
def test_every_service_is_hardened(service, line):
    assert HARDENED[line](SERVICES[service])


@pytest.mark.parametrize("line", SERVING)
def test_the_server_keeps_its_contract(line):
    assert SERVING[line]()


@pytest.mark.parametrize("name", ["docker-compose.cpu.yml", "docker-compose.dev.yml"])
def test_no_other_file_softens_the_hardening(name):
    softer = {"cap_drop", "security_opt", "read_only", "user", "ports", "secrets", "restart", "networks", "privileged"}
    allowed = {"dev": {"user", "read_only"}}  # a developer compiles, in a container that serves nobody else
    for service, entry in read(name)["services"].items():
        if service in SERVICES:
            assert not softer & entry.keys() - allowed.get(service, set())


def test_the_profile_of_the_gpu_reservation_can_be_taken_back():
    assert read("docker-compose.cpu.yml")["services"]["vllm"]["deploy"]["resources"]["reservations"]["devices"] == []


def test_monitor_and_bench_do_not_start_by_themselves():
    assert {name: entry.get("profiles") for name, entry in SERVICES.items()} == {
        "vllm": None,
        "prometheus": ["monitor"],
        "node-exporter": ["monitor"],
        "grafana": ["monitor"],
        "bench": ["bench"],
    }


@pytest.mark.parametrize("name", ["safe", "fast", "long-context"])
def test_a_serve_profile_takes_the_hardware_path_and_graphs_for_5_and_10(name):
    flags = {flag.name: flag.value for flag in profiles.named(name).flags}
    assert flags["--moe-backend"] == "flashinfer_cutlass"
    assert flags["--quantization-config.moe.activation"] == "mxfp8"
    assert flags["--attention-backend"] == "FLASHINFER"
    assert {"--quantization", "--enable-lora", "--enforce-eager"}.isdisjoint(flags)
    sizes = json.loads(flags["--compilation-config"])["cudagraph_capture_sizes"]
    assert {1, 5, 10} <= set(sizes)
    assert max(sizes) >= int(flags["--max-num-seqs"])
    assert sizes == sorted(sizes)


def test_every_flag_of_every_profile_has_a_reason():
    for profile in profiles.load().values():
        assert all(len(setting.why) > 10 for setting in (*profile.flags, *profile.environment))


def test_the_dashboard_asks_its_own_data_source_only():
    board = json.loads((ROOT / "deploy/grafana/dashboards/vllm.json").read_text(encoding="utf-8"))
    source = yaml.safe_load(
        (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    )
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["datasources"][0]["uid"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])


def test_prometheus_reads_the_services_that_compose_names():
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
    targets = [
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert {target.partition(":")[0] for target in targets} <= SERVICES.keys()
