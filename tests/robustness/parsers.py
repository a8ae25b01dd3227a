"""Every parser: samples that it accepts, and a call that reads a sample through the parser's public function.

A call may raise our own errors. It raises AssertionError if the parser accepted an input that it must refuse.
"""

import contextlib
import gzip
import hashlib
import io
import json
import subprocess
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unittest import mock

import fatbins
import httpx
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fatbins import entry, fatbin
from sigstore_instance import Instance

from lab import trace
from robustness.scenario import write
from robustness.scenarios import archives, benchmarks, checkpoints, patching
from sparkforge import pins
from sparkforge.audit import elf
from sparkforge.audit import rules as audit_rules
from sparkforge.audit.cubins import Reader, Tools
from sparkforge.audit.report import audit_files
from sparkforge.bench import schema, settings
from sparkforge.core import events, files, manifest, redact, tables
from sparkforge.core.errors import IntegrityError, ServerError, SparkforgeError
from sparkforge.core.files import DocumentError
from sparkforge.core.openai import Endpoint
from sparkforge.core.paths import ROOT
from sparkforge.doctor import signatures
from sparkforge.image import inspect, oci, packs, provenance, signing, trust, versions
from sparkforge.image.attached import Attached
from sparkforge.models import hub
from sparkforge.models import recipes as models
from sparkforge.models.hub_source import Mirror
from sparkforge.patching import hunks
from sparkforge.patching import wheels as patched_wheels
from sparkforge.patching.series import Patch, Queue
from sparkforge.pins import index, wheels
from sparkforge.plan import architecture
from sparkforge.serve import access, proof, record
from sparkforge.serve import settings as container
from sparkforge.serve.cluster import config as cluster_config
from sparkforge.serve.command_line import ServerCommand
from sparkforge.sources import archive, bundle
from validate.facts import checkpoint, fact
from validate.facts.target import Options, Target

Read = Callable[[bytes, Path], object]


@dataclass(frozen=True)
class Parser:
    """One parser. `samples` may use the folder that `read` gets; `around` is a context of a run; see Scenario.cost."""

    name: str
    samples: Callable[[Path], list[bytes]]
    read: Read
    around: Callable[[Path], AbstractContextManager[None]] = contextlib.nullcontext
    cost: float = 1.0


def _texts(*texts):
    return lambda _scratch: [text.encode() for text in texts]


def _pins_without_git(_scratch):
    """Return pins.toml without its longest tables, which no other table needs."""
    tables = (ROOT / "pins.toml").read_bytes().split(b"\n\n")
    return [b"\n\n".join(table for table in tables if b".git." not in table.partition(b"]")[0])]


def _loaded(load, name):
    def read(data, scratch):
        return load(write(scratch / name, data))

    return read


# Patches


DIFF = patching.CHANGES.format(word="TWO")
PATCH = patching.HEADER + DIFF


def _read_hunks(data, _scratch):
    for change in hunks.parse("0001-x.patch", data.decode(errors="replace")):
        before = patching.BEFORE.get(change.path)
        change.apply(before.encode() if before else None)


def _read_series(data, scratch):
    folder = scratch / "up-1"
    write(folder / "0001-a.patch", PATCH)
    write(folder / "0002-b.patch", PATCH)
    Queue.load(write(folder / "series", data).parent)


def _read_upstream_wheel(data, scratch):
    """Patch a wheel that was tampered with; the result must be a wheel that can be unpacked."""
    source = write(scratch / patching.NAME, data)
    queue = Queue.load(patching.queue(scratch, "patches", "TWO"))
    with (scratch / "out.whl").open("wb") as output:
        patched_wheels.make(source, patching.table().component("s", "up"), queue, 1, output)
    with suppress(IntegrityError):  # a member that no patch touches may be damaged: the wheel's hash is pinned
        archive.unpack(scratch / "out.whl", scratch / "unpacked")


def _read_oracle(data, scratch):
    """Check that we refuse what git refuses, and that accepted patches give the same files as git."""
    try:
        changes = hunks.parse("0001-x.patch", data.decode())
        ours = {path: text.encode() for path, text in patching.BEFORE.items()}
        for change in changes:
            content = change.apply(ours.pop(change.path, None))
            if content is not None:
                ours[change.path] = content
        hunks.refuse_folders("0001-x.patch", ours)
    except UnicodeDecodeError:
        return
    root = scratch / "tree"
    manifest.remove(root)
    for path, text in patching.BEFORE.items():
        write(root / path, text)
    result = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "apply", "-p1", "--whitespace=nowarn", "-"],  # noqa: S607
        cwd=root, input=data, capture_output=True, check=False, timeout=60,
        env={"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": str(scratch), "GIT_CONFIG_GLOBAL": "/dev/null",
             "GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip
    assert result.returncode == 0, f"git refuses it: {result.stderr.decode(errors='replace')[:300]}"
    theirs = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert ours == theirs, "git makes other files of it"


# Archives


def _raw_tar(files):
    return gzip.decompress(archives.tar("", files))


SMALL = {"a.py": b"x = 1\n", "d/b.py": b"y\n" * 200, "d/é" * 60: b"", "e": b"\0" * 700}


def _zips(_scratch):
    samples = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w", method) as out:
            for name, content in SMALL.items():
                out.writestr(name, content)
        samples.append(data.getvalue())
    return samples


def _unpack(name):
    def read(data, scratch):
        """Unpack, and check that no other files appear beside the target."""
        file = write(scratch / name, data)
        target = scratch / "in/target"
        try:
            archive.unpack(file, target)
        finally:
            beside = sorted(path.name for path in (*scratch.iterdir(), *(scratch / "in").iterdir()))
            manifest.remove(scratch / "in")
            assert beside in (sorted(["in", name, "target"]), sorted(["in", name])), f"something lies outside: {beside}"

    return read


def _bundle(members, **about):
    listed = {path: {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)} for path, data in members.items()}
    value = {"schema": bundle.SCHEMA, **about, "members": listed, "absent": []}
    return [_raw_tar({"index.json": json.dumps(value, indent=1).encode(), **members})]


def _bundles(_scratch):
    return _bundle({"pins.toml": b"schema = 1\n", "files/x/y.whl": b"wheel"}, stack="s", target="t")


def _read_bundle(data, scratch):
    """Unpack a bundle, and check that an accepted bundle has the files of its index."""
    file = write(scratch / "b.tar", data)
    manifest.remove(scratch / "out")
    manifest.beside(scratch / "out").unlink(missing_ok=True)
    bundle.unpack(file, scratch / "out")
    for path, member in json.loads((scratch / "out/index.json").read_bytes())["members"].items():
        assert hashlib.sha256((scratch / "out" / path).read_bytes()).hexdigest() == member["sha256"], path


PACKED = {"nvcc": "13.0", "machine": "aarch64"}  # the key of a pack


def _packs(_scratch):
    members = {"audit.json": b"{}", "libraries/m.so": b"machine code", "sbom.json": b"{}"}
    facts = {"units": 1, "modules": {"m": 1}}
    return _bundle(members, key=packs.key_of(PACKED), inputs=PACKED, facts=facts)


def _read_pack(data, scratch):
    """Take modules from a kernel pack, and check that only a library with a hash in the index is taken."""
    file, output = write(scratch / "pack.tar", data), scratch / "out"
    manifest.remove(output)
    output.mkdir()
    order = mock.Mock(identity=PACKED, output=output)
    facts = packs.taking(str(file))(order, {"m": output / "m.so"})
    assert facts
    assert [path.name for path in output.rglob("*")] == ["m.so"]
    assert hashlib.sha256((output / "m.so").read_bytes()).hexdigest().encode() in data


# Binaries


CUBIN = fatbins.cubin("sm_121a", 121)


def _binaries(scratch):
    (scratch / "all.fatbin").write_bytes(
        fatbin(entry(CUBIN, sm=121), entry(b".version 8.7", kind=elf.KIND_PTX, sm=121))
        + bytes(32)
        + fatbin(entry(zstandard.compress(CUBIN), len(CUBIN), sm=121))
    )
    write(scratch / "fat.s", f'.section .nv_fatbin,"a"\n.balign 8\n.incbin "{scratch}/all.fatbin"\n'
                             '.section .note.GNU-stack,"",@progbits\n')  # fmt: skip
    write(scratch / "host.c", '#include <stdio.h>\nint foreign(void);\nint f(void) { return puts("x") + foreign(); }\n')
    options = ["-shared", "-fPIC", "-Wl,-z,noseparate-code", "-nostartfiles", "-s"]
    for name in ("fat.s", "host.c"):
        subprocess.run(["cc", *options, scratch / name, "-o", scratch / f"{name}.so"], check=True)  # noqa: S607
    samples = [(scratch / "fat.s.so").read_bytes(), (scratch / "host.c.so").read_bytes(), CUBIN]
    for path in scratch.iterdir():
        path.unlink()
    return samples


_rules = cache(audit_rules.load)
NO_TOOLS = Tools(Path("/bin/false"), Path("/bin/false"))


def _read_binary(data, scratch):
    """Read one file as the audit does; a damaged file is a finding, not an error. No program is run."""
    file = write(scratch / "one.so", data)
    reader = Reader(NO_TOOLS, _rules().watch())
    (binary,) = reader.finished([reader.draft(file, "one.so")])
    audit_rules.judge(binary, _rules())


def _wheels(scratch):
    return [archives.wheel("one-1.dist-info", {"one/one.so": _binaries(scratch)[1]})]


# The network


class _Answer:
    """The answer to every httpx request while `_answering` is active."""

    body, kind = b"", "text/plain"


def _handle(_transport, request):
    return httpx.Response(
        200, headers={"Content-Type": _Answer.kind}, stream=httpx.ByteStream(_Answer.body), request=request
    )


@contextmanager
def _answering(_scratch):
    """Answer every request with the input. Reuse the certificates, because reading them takes 10 ms for each client."""
    context = httpx.create_ssl_context(verify=False)
    with (
        mock.patch.object(httpx.HTTPTransport, "handle_request", _handle),
        mock.patch("httpx._transports.default.create_ssl_context", return_value=context),
    ):
        index.pip_config()
        yield


def _read_index(kind):
    def read(data, _scratch):
        _Answer.body, _Answer.kind = data, kind
        with httpx.Client() as http:
            index.locate("thing", "thing-1-py3-none-any.whl", http)

    return read


FILE = {"filename": "thing-1-py3-none-any.whl", "url": "../../files/thing-1-py3-none-any.whl", "size": 7,
        "hashes": {"sha256": "0" * 64}, "requires-python": ">=3.9", "yanked": False,
        "upload-time": "2026-01-01T00:00:00Z"}  # fmt: skip
INDEX_JSON = json.dumps({"meta": {"api-version": "1.1"}, "name": "thing", "versions": ["1"], "files": [FILE]})
INDEX_HTML = f"""<!DOCTYPE html><html><head><meta name="pypi:repository-version" content="1.0"><base href="/x/"></head>
<body><a href="../../files/thing-1-py3-none-any.whl#sha256={"0" * 64}" data-requires-python="&gt;=3.9" data-yanked="no"
>thing-1-py3-none-any.whl</a><br></body></html>"""
PIECE = {"choices": [{"delta": {"content": "hé\u2028", "reasoning": None}}], "usage": {"completion_tokens": 1}}
EVENTS = [json.dumps(PIECE, ensure_ascii=False), json.dumps(PIECE), "[DONE]"]
STREAM = ": ping\n\nevent: x\n" + "".join(f"data: {event}\n\n" for event in EVENTS)
URL = "http://127.0.0.1:8000"
TOKEN = '{"choices": [{"text": "hi"}], "usage": {"completion_tokens": 1}}'
CITY = {"city": "Rome"}
CALLED = [{"function": {"name": "get_weather", "arguments": json.dumps(CITY)}}]
ANSWER = {"role": "assistant", "content": json.dumps(CITY), "tool_calls": CALLED}
LOGPROBS = {"content": [{"logprob": -1, "top_logprobs": []}]}
CHOICE = {"message": ANSWER, "finish_reason": "stop", "logprobs": LOGPROBS, "prompt_logprobs": [None, {"1": LOGPROBS}]}
PROOF = json.dumps({"choices": [CHOICE], "usage": {"completion_tokens": 1}})
TOKENS = '{"tokens": [1, 2], "version": "0.32.0"}'
COUNTER = "vllm:generation_tokens_total 3.0\n"
MODELS = '{"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}'


def _read_stream(data, _scratch):
    _Answer.body, _Answer.kind = data, "text/event-stream"
    for delta in Endpoint(URL, "m", key="").stream_chat([{"role": "user", "content": "hello"}], 8):
        delta.text.encode(errors="surrogatepass")


def _read_proof(data, _scratch):
    for name, call in proof.CALLS.items():
        _Answer.body, _Answer.kind = data, "text/event-stream" if call.body.get("stream") else "application/json"
        with suppress(ServerError):
            proof.fault_of(name, Endpoint(URL, "m", key=""), 5.0)


def _read_endpoint(data, _scratch):
    _Answer.body, _Answer.kind = data, "application/json"
    at = Endpoint(URL, "m", 5.0)
    at.tokenize("x")
    at.generated()
    at.version()
    at.served()


def _read_url(data, _scratch):
    _Answer.body, _Answer.kind = MODELS.encode(), "application/json"
    settings.endpoint(settings.BenchSettings({"model": "m", "silence": "5", "url": data.decode(errors="replace")}, {}))


# Files of ours


def _read_state(name, load):
    def read(data, scratch):
        path = write(scratch / "state" / name, data)
        path.chmod(0o600)  # files that others may write are never read
        path.parent.chmod(0o700)
        return load(path.parent)

    return read


TRACE = """{"schemaVersion": 1, "traceEvents": [
{"ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 1, "ts": 4463.5, "dur": 100.25},
{"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "pid": 1, "tid": 1, "ts": 4470, "dur": 60},
{"ph": "X", "cat": "user_annotation", "name": "spark_mxfp4::moe", "pid": 1, "tid": 1, "ts": 4600, "dur": 50},
{"ph": "X", "cat": "cpu_op", "name": "aten::mul", "pid": 1, "tid": 1, "ts": 4610, "dur": 10},
{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}
], "displayTimeUnit": "ms"}
"""


def _traces(_scratch):
    data = TRACE.encode()
    return [data, data.replace(b'"cpu_op"', b'"kernel"'), gzip.compress(data, mtime=0)]


MANIFEST = {"stage": "s", "inputs": {"a": "b"}, "outputs": {"c": "0" * 64}, "tools": {}, "facts": {"n": 1},
            "seconds": 0.1, "schema": manifest.SCHEMA}  # fmt: skip


def _read_manifest(data, scratch):
    write(manifest.beside(scratch / "thing"), data)
    manifest.load(scratch / "thing")
    manifest.current(scratch / "thing", "s", {"a": "b"})


def _checkpoint(name):
    def read(data, scratch):
        """Fetch from a folder, and check it as the validator does."""
        for path, content in checkpoints.READ.items():
            if not (scratch / "mirror" / path).exists():
                write(scratch / "mirror" / path, content)
        write(scratch / "mirror" / name, data)
        target = Target(Options(model=scratch / "mirror"), "spark")
        for reading in checkpoint.READINGS:
            fact.take(reading, target)
        manifest.remove(scratch / "models")
        hub.fetch_checkpoint(Mirror(scratch / "mirror", checkpoints.NAME, ""), scratch / "models/gpt-oss-120b")

    def samples(_scratch):
        entry = {"size": len(CONFIG), "sha256": hashlib.sha256(CONFIG).hexdigest()}
        note = {"schema": 1, "repository": checkpoints.NAME, "revision": "0" * 40, "files": {"config.json": entry}}
        return [checkpoints.READ.get(name) or json.dumps(note).encode()]

    return samples, read


LOCK = """\
# Made from locks/x.in; do not edit. Inputs: sha256 0
anyio==4.9.0 ; python_version >= "3.9" \\
    --hash=sha256:{zeros} \\
    --hash=sha256:{ones}
    # via httpx
httpx[http2]==0.28.1 --hash=sha256:{zeros}
""".format(zeros="0" * 64, ones="1" * 64)


LOG = """\
(EngineCore pid=7) ERROR 11-21 03:40:13 [core.py:99] RuntimeError: CUDA error: no kernel image is available
\x1b[31m✗ the server ended\x1b[0m
  why:  no room
        and more
  next: ./inv down
Authorization: Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4 https://u:p@h.local:1/x fe80::1%eth0
HF_TOKEN=hf_PlantedToken123 --api-key sesame /home/anna/models 10.1.2.3 48:b0:2d:5c:1e:9a
-----BEGIN OPENSSH PRIVATE KEY-----
"""


_signatures = cache(signatures.load)


ENVIRONMENT = (
    "SPARKFORGE_PROFILE=embedded\0SPARKFORGE_VALIDATE=warn\0SPARKFORGE_VALIDATE_SECONDS=60\0SPARKFORGE_MODEL=/models/x\0"
    "SPARKFORGE_API_KEY_FILE=/nonexistent\0PORT=8000\0RANDOM_RANGE_RATIO=0.5"
)


def _read_environment(data, _scratch):
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    env = {name: value for name, _, value in pairs}
    container.read(env)
    ServerCommand("m", "m", "127.0.0.1", 8000, extra_arguments=("--port", env.get("PORT", ""))).address()
    settings.BenchSettings({}, env).share()
    settings.BenchSettings({}, env).number("port", 0)


CONFIG = checkpoints.READ["config.json"]


def _configs(_scratch):
    whole = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "hidden_size": 2880,
             "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "num_key_value_heads": 8,
             "head_dim": 64, "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
             "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    return [json.dumps(whole).encode(), CONFIG]


IMAGE_MANIFEST = json.dumps({"stack": "s", "patches": {"vllm-0.32.0": "0" * 64}, "lock": {"embedded": "1" * 64},
                             "packages": {"vllm": "0.32.0"}, "kernels": {"xqa": "f" * 64},
                             "audit": {"a.json": "2" * 64}, "device": "cpu", "key": "k"})  # fmt: skip
IMAGE_AUDIT = json.dumps(
    {"files": 3, "code": {"violations": [{"rule": "r", "file": "f"}], "files": [{"path": "/x.so"}]}}
)
LABELS = json.dumps({"Config": {"Labels": {"org.sparkforge.stack": "s"}, "User": "u"}, "Id": "sha256:0", "Size": 5})


def _read_image(data, _scratch):
    """Read one input as an image's manifest, audit, source and configuration, and use each as the commands do."""
    with suppress(SparkforgeError):
        inspect.unaudited({"audit": {"a": hashlib.sha256(data).hexdigest()}, "kernels": {"xqa": "f"}}, data)
    with suppress(SparkforgeError):
        inspect._parsed(data, inspect.Source)
    with suppress(ValueError):
        attrs = files.parse_json(data, "x")
        inspect.labels(attrs if isinstance(attrs, dict) else {})
    document = inspect._parsed(data, inspect.Manifest)
    inspect.differences(document, {"patches": {"a": "b"}, "lock": {}})
    versions.version(document)
    inspect.unaudited(document, b"{}")


CLUSTER = """\
schema = 1
device = "docker"
model = "/models/gpt-oss-120b"
flags = ["--max-num-seqs", "4", "--gpu-memory-utilization=0.8"]
key_file = "/run/key"
[[nodes]]
name = "a"
address = "10.0.0.1"
interface = "eth1"
hcas = ["rocep1s0f0"]
[[nodes]]
name = "b"
ssh = "nvidia@spark-2"
folder = "/home/nvidia/spark forge"
address = "10.0.0.2"
interface = "eth1"
"""


def _read_key(data, scratch):
    path = write(scratch / "key", data)
    path.chmod(0o600)
    key = access.read_key(path)
    if not key.isprintable() or " " in key:
        raise AssertionError(key)


def _read_envelope(data, _scratch):
    signing.read_statement(Attached(data, signing.ENVELOPE_TYPE), {"key": KEY.public_key()})


def _read_sigstore(data, scratch):
    write(scratch / "root.json", SIGSTORE.trusted_root().encode())
    signer = trust.Identity(identity="urn:a", issuer="b", trusted_root="root.json")
    try:
        _, payload = trust.read_bundle(data, {"a": signer}, scratch)
    except ValueError as error:
        raise DocumentError("a bundle", str(error)) from error
    if json.loads(payload) != STATEMENT:
        raise AssertionError(payload)


KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
SIGSTORE = Instance()
STATEMENT = {"_type": provenance.STATEMENT, "predicateType": provenance.SLSA}
TRUST = f'schema = 1\n[keys.a]\npublic = """{signing.public_text(KEY)}"""\n[images]\ndemand = ["signature"]\n'
OCI_INDEX = json.dumps({"manifests": [{"digest": f"sha256:{'0' * 64}", "size": 2, "annotations": {"a": "b"}}]})


def _wheel_locked(text):
    return list(wheels.requirements(text, wheels.TargetMachine("x86_64", (3, 12))))


def _redacted(text):
    return redact.for_support({text[:50]: [text]})


def _text(read):
    """Return the reader of a text."""
    return lambda data, _scratch: read(data.decode(errors="replace"))


SERVER = asdict(record.Server(1, 1.5, "127.0.0.1", 8000, "/m", "m", "embedded", "/l", "", "/k"))
FAILED = '{"error": "InputError", "what": "a", "why": "b", "fix": "c", "began": 1.5, "ended": 2.5}'
URLS = (URL, "https://user:pw@host.example.org:8443/v1/", "http://[::1]:80/")
ROWS = [
    Parser("image-manifest", _texts(IMAGE_MANIFEST, IMAGE_AUDIT, LABELS), _read_image),
    Parser("trust-toml", _texts(TRUST), _loaded(lambda file: tables.load(file, trust.Trust), "trust.toml")),
    Parser("envelope", _texts(signing.signed(STATEMENT, KEY).data.decode()), _read_envelope),
    Parser("sigstore", _texts(json.dumps(SIGSTORE.bundle(STATEMENT, "urn:a", "b"))), _read_sigstore, cost=8.0),
    Parser("oci-index", _texts(OCI_INDEX), _loaded(lambda file: oci.Layout(file.parent), "layout/index.json")),
    Parser("cluster-toml", _texts(CLUSTER), _loaded(cluster_config.read, "cluster.toml")),
    Parser("environment", _texts(ENVIRONMENT), _read_environment),
    Parser("secrets", _texts(LOG), _text(_redacted), cost=8.0),
    Parser("api-key", _texts("0123456789abcdef0123456789abcdef\n"), _read_key),
    Parser("patch", _texts(PATCH), _loaded(Patch.load, "0001-x.patch")),
    Parser("hunks", _texts(DIFF), _read_hunks),
    Parser("series", _texts("# a comment\n\n0001-a.patch\n0002-b.patch # more\n"), _read_series, cost=4.0),
    Parser("patched-wheel", lambda _: [patching.wheel()], _read_upstream_wheel, cost=8.0),
    Parser("patch-like-git", _texts(DIFF), _read_oracle, cost=20.0),
    Parser("pins", _pins_without_git, _loaded(pins.load, "pins.toml"), cost=8.0),
    Parser("lock", _texts(LOCK), _text(_wheel_locked), cost=2.0),
    Parser("index-html", _texts(INDEX_HTML), _read_index("text/html"), _answering, cost=4.0),
    Parser("index-json", _texts(INDEX_JSON), _read_index("application/vnd.pypi.simple.v1+json"), _answering, cost=4.0),
    Parser("tar", lambda _: [_raw_tar(SMALL), _raw_tar({"a": b"1"})], _unpack("x.tar"), cost=3.0),
    Parser("tar-gz", lambda _: [archives.tar("", SMALL)], _unpack("x.tar.gz"), cost=3.0),
    Parser("zip", _zips, _unpack("x.whl"), cost=3.0),
    Parser("bundle", _bundles, _read_bundle, cost=8.0),
    Parser("kernel-pack", _packs, _read_pack, cost=8.0),
    Parser("elf", _binaries, _read_binary, cost=10.0),
    Parser("wheel", _wheels, _loaded(lambda file: audit_files([file], tools=lambda: NO_TOOLS, rules=_rules()),
           "one-1-py3-none-linux_x86_64.whl"), cost=20.0),
    Parser("stream", _texts(STREAM), _read_stream, _answering, cost=6.0),
    Parser("proof", _texts(TOKEN, PROOF, STREAM), _read_proof, _answering, cost=20.0),
    Parser("endpoint", _texts(MODELS, TOKENS, COUNTER), _read_endpoint, _answering, cost=20.0),
    Parser("url", _texts(*URLS), _read_url, _answering, cost=6.0),
    Parser("result", lambda _: [benchmarks.result(1).model_dump_json(indent=1).encode()],
           _loaded(schema.read, "out/result.json"), cost=3.0),
    Parser("trace", _traces, _loaded(trace.read, "trace.json"), cost=2.0),
    Parser("recipe", _texts((ROOT / "sparkforge/recipes/gpt-oss-120b.toml").read_text(encoding="utf-8")),
           _loaded(models.read.__wrapped__, "recipe.toml"), cost=4.0),  # without its cache
    Parser("server-record", _texts(json.dumps(SERVER)),
           _read_state("server.json", lambda state: record.read(state / "server.json"))),
    Parser("failure-record", _texts(FAILED), _read_state("failure.json", record.read_failure)),
    Parser("manifest", _texts(json.dumps(MANIFEST)), _read_manifest),
    Parser("architecture", _configs, _loaded(architecture.read, "config.json")),
    Parser("safetensors", *_checkpoint("model-00001-of-00002.safetensors"), cost=30.0),
    Parser("safetensors-index", *_checkpoint("model.safetensors.index.json"), cost=30.0),
    Parser("checkpoint-config", *_checkpoint("config.json"), cost=30.0),
    Parser("checkpoint-note", *_checkpoint("sparkforge-model.json"), cost=30.0),
    Parser("log", _texts(LOG), lambda data, _: signatures.recognise(events.read([data[:7], data[7:]]), _signatures())),
]  # fmt: skip
PARSERS = {parser.name: parser for parser in ROWS}
