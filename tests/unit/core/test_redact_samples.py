"""What redaction must take out, and what it must leave: (text, its secret part), and harmless lines.

`¦` is removed before use: scanners of repositories would take the samples for real tokens.
"""

import subprocess
import sys
import time

import pytest

from sparkforge.core import redact
from sparkforge.core.paths import ROOT

X40 = "0aB1cD2eF3gH4iJ5kL6mN7oP8qR9sT0uV1wX2yZ3"
HEX32 = "0123456789abcdef0123456789abcdef"

TOKENS = [
    "hf_¦AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "hf_¦abcdefghijklmnopqrstuvwxyzabcdefgh",
    "api_org_¦AbCdEfGhIjKlMnOpQrStUvWxYz012345",
    "sk-¦abcdefghij0123456789",
    "sk-¦proj-Ab_cd-EfGh0123456789",
    "sk-¦ant-api03-Ab_cd-EfGh0123456789",
    "sk_¦live_4eC39HqLyjWDarjtT1zdp7dc",
    "sk_¦test_4eC39HqLyjWDarjtT1zdp7dc",
    "rk_¦live_4eC39HqLyjWDarjtT1zdp7dc",
    "whsec_¦4eC39HqLyjWDarjtT1zdp7dc",
    f"gh¦p_{X40[:36]}",
    f"gh¦o_{X40[:36]}",
    f"gh¦s_{X40[:36]}",
    f"github_¦pat_11ABCDEFG0{X40}",
    f"gl¦pat-{X40[:20]}",
    f"gl¦dt-{X40[:20]}",
    f"gl¦rt-{X40[:20]}",
    f"GR¦1348941{X40[:20]}",
    f"nv¦api-{X40}",
    "xo¦xb-123456789012-1234567890123-AbCdEfGhIjKlMnOpQrStUvWx",
    "xo¦xp-123456789012-1234567890123-AbCdEf",
    "xa¦pp-1-A012345-1234567890-abcdef0123456789",
    "AK¦IAIOSFODNN7EXAMPLE",
    "AS¦IAIOSFODNN7EXAMPLE",
    f"AI¦zaSy{X40[:33]}",
    f"ya¦29.{X40}",
    f"GO¦CSPX-{X40[:28]}",
    f"np¦m_{X40[:36]}",
    f"py¦pi-AgEIcHlwaS5vcmcCJ{X40}{X40}",
    f"py¦pi-AgENdGVzdC5weXBpLm9yZwIk{X40}{X40}",
    f"dckr_¦pat_{X40[:27]}",
    f"dckr_¦oat_{X40[:27]}",
    f"S¦G.{X40[:22]}.{X40}abc",
    f"shp¦at_{HEX32}",
    f"dop_¦v1_{HEX32}{HEX32}",
    f"hv¦s.{X40}",
    f"da¦pi{HEX32}",
    f"lin_¦api_{X40}",
    f"figd_¦{X40}",
    f"sq0¦csp-{X40}abc",
    f"glsa_¦{X40[:32]}_01234567",
    f"ts¦key-auth-{X40[:20]}",
    f"gs¦k_{X40}",
    f"r8_¦{X40[:37]}",
    f"xa¦i-{X40}{X40}",
    f"pp¦lx-{X40}",
    f"S¦K{HEX32}",
    f"A¦C{HEX32}",
    f"{HEX32}-us¦12",
    f"123456789:¦{X40[:35]}",
    f"M{X40[:23]}.¦{X40[:6]}.{X40[:27]}",
    "ey¦JhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "ey¦JhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.",
    "AGE-¦SECRET-KEY-1QQPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
]
PAIRS = [
    ("HF_TOKEN=verysecret rest", "verysecret"),
    ("export OPENAI_API_KEY='very secret words'", "secret words"),
    ('API_KEY="one two three"', "two three"),
    ("DB_PASS=hunter2", "hunter2"),
    ("MYSQL_PWD=hunter2", "hunter2"),
    ("Server=db;Uid=app;pwd=hunter2;Timeout=5", "hunter2"),
    ("PGPASSWORD=hunter2 psql", "hunter2"),
    ("password=correct,horse;battery", "battery"),
    ('"password": "hunter2"', "hunter2"),
    ("'password': 'correct horse battery'", "horse battery"),
    ("password: hunter2", "hunter2"),
    ("password = hunter2", "hunter2"),
    ("passwd:hunter2", "hunter2"),
    ("passphrase => 'open sesame'", "open sesame"),
    ("Passwort password:= hunter2", "hunter2"),
    ("DATABASE_PASSWORD_2=hunter2", "hunter2"),
    ("SECRET_KEY_BASE=abcdefabcdef", "abcdefabcdef"),
    ("client_secret: abcdef-123", "abcdef-123"),
    ("AWS_SECRET_ACCESS_KEY=abc/def+ghi", "abc/def+ghi"),
    ("aws_access_key_id = someid1234", "someid1234"),
    ("aws_session_token=FwoGZXIvYXdzEBYaD", "FwoGZXIvYXdzEBYaD"),
    ("X-Api-Key: sesame-open", "sesame-open"),
    ("x-api-key=sesame-open", "sesame-open"),
    ("api-key: sesame-open", "sesame-open"),
    ("apikey=sesame-open", "sesame-open"),
    ("apiKey: 'sesame open'", "sesame open"),
    ("ENCRYPTION_KEY=sesame", "sesame"),
    ("SSH_KEY=sesame", "sesame"),
    ("WANDB_API_KEY=" + HEX32 + "01234567", HEX32),
    ("signing_key: sesame", "sesame"),
    ("LICENSE_KEY=ABCD-EFGH-1234", "ABCD-EFGH-1234"),
    ("//npm.example.com/:_authToken=abcdef-0123", "abcdef-0123"),
    ("_auth=dXNlcjpwdw==", "dXNlcjpwdw"),
    ('{"auths": {"r": {"auth": "dXNlcjpwdw=="}}}', "dXNlcjpwdw"),
    ('{"api_key": "sesame", "port": 1}', "sesame"),
    ('{\\"api_key\\": \\"sesame open\\"}', "sesame open"),
    ('{\\\\\\"api_key\\\\\\": \\\\\\"sesame open\\\\\\"}', "sesame open"),
    ("'api_key': ['first-sesame', 'second-sesame']", "first-sesame"),
    ("'api_key': ['first-sesame', 'second-sesame']", "second-sesame"),
    ('"api_key": ["first-sesame","second-sesame"]', "second-sesame"),
    ("api_key=[first-sesame, second-sesame]", "second-sesame"),
    ("api_key=('first-sesame', 'second-sesame')", "second-sesame"),
    ('"api_keys": [\n  "first-sesame",\n  "second-sesame"\n]', "second-sesame"),
    ("api_key:\n  - first-sesame\n  - second-sesame\n", "second-sesame"),
    ('{"name": "API_KEY", "value": "sesame"}', "sesame"),
    ('{"name":"DB_PASS","value":"open sesame"}', "open sesame"),
    ('{"value": "sesame", "name": "API_KEY"}', "sesame"),
    ("- name: API_KEY\n  value: sesame\n", "sesame"),
    ('("api_key", "sesame")', "sesame"),
    ("('Authorization', 'Bearer sesame')", "sesame"),
    ("(b'authorization', b'Bearer sesame')", "sesame"),
    ("['x-api-key', 'sesame']", "sesame"),
    ("('password', 'open sesame')", "open sesame"),
    ("<password>hunter2</password>", "hunter2"),
    ("<add key='x'/><clientSecret>hunter2</clientSecret>", "hunter2"),
    ("?token%3Dsesame%26x", "sesame"),
    ("token: 'abc\\'def'", "def"),
    ("CREATE USER x IDENTIFIED BY 'hunter2'", "hunter2"),
    ("ALTER ROLE x PASSWORD 'hunter2'", "hunter2"),
    ("csrf=abcdef123", "abcdef123"),
    ("otp: 12345678", "12345678"),
    ("env API_KEY=sesame,MODE=fast", "sesame"),
    ("credentials: anna-hunter2", "anna-hunter2"),
    ("GITHUB_PAT=sesame", "sesame"),
    ("PHPSESSID=sesame", "sesame"),
    ("pw=hunter2", "hunter2"),
    ("ENV API_KEY sesame", "sesame"),
    ("aws_secret_access_key wJalrXUtnFEMI7K7MDENGbPx", "MDENG"),
    ("Password for anna: hunter2", "hunter2"),
    ("GITHUB_PAT_2: sesame", "sesame"),
]
FLAGS = [
    ("vllm serve --api-key sesame --port 1", "sesame"),
    ("vllm serve --api-key=sesame --port 1", "sesame"),
    ("vllm serve --api-key sesame1 sesame2 --port 1", "sesame2"),
    ("vllm serve --api-key 'open sesame' --port 1", "open sesame"),
    ('--hf-token "open sesame"', "open sesame"),
    ("['--api-key', 'sesame', '--port', '1']", "sesame"),
    ('["--api-key", "sesame"]', "sesame"),
    ("wget --password=hunter2 x", "hunter2"),
    ("wget --http-password hunter2 x", "hunter2"),
    ("curl -u anna:hunter2 x", "hunter2"),
    ("curl -uanna:hunter2 x", "hunter2"),
    ("curl -u 'anna:open sesame' x", "open sesame"),
    ("curl --user anna:hunter2 x", "hunter2"),
    ("curl -su anna:hunter2 x", "hunter2"),
    ("curl --user=anna:hunter2 x", "hunter2"),
    ("curl --proxy-user anna:hunter2 x", "hunter2"),
    ("curl -U anna:hunter2 x", "hunter2"),
    ("curl -b session=sesame x", "sesame"),
    ("curl --cookie 'session=sesame; b=c' x", "sesame"),
    ("curl -H 'X-Api-Key: sesame' x", "sesame"),
    ("curl -H 'Authorization: Bearer sesame' x", "sesame"),
    ("sshpass -p hunter2 ssh x", "hunter2"),
    ("docker login -u anna -p hunter2 r", "hunter2"),
    ("mysqldump -h db -phunter2 all", "hunter2"),
    ("redis-cli -h db -a hunter2 ping", "hunter2"),
    ("machine x login anna password hunter2", "hunter2"),
]
HEADERS = [
    ("Authorization: Bearer abc.def-ghi", "abc.def-ghi"),
    ("authorization: bearer short", "short"),
    ("Authorization: token sesame", "sesame"),
    ("Authorization: Basic dXNlcjpwdw==", "dXNlcjpwdw"),
    ("Authorization: Basic YTpi", "YTpi"),
    ("Authorization: ApiKey sesame", "sesame"),
    ("Authorization: sesame", "sesame"),
    ("Authorization: Custom sesame", "sesame"),
    ("Authorization: Negotiate YIIabc", "YIIabc"),
    ('Authorization: Digest username="anna", response="6629fae49393a05397450978507c4ef1"', "6629fae4"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=AKID/2026/s3, Signature=fe5f80f77d5fa3", "fe5f80f77d5fa3"),
    ("Proxy-Authorization: Basic dXNlcjpwdw==", "dXNlcjpwdw"),
    ('"Authorization": "Bearer sesame"', "sesame"),
    ('\\"Authorization\\": \\"Bearer sesame\\"', "sesame"),
    ("Cookie: session=sesame; theme=dark", "sesame"),
    ("Cookie: theme=dark; session=sesame", "sesame"),
    ("Set-Cookie: id=sesame; HttpOnly", "sesame"),
    ("{'cookie': 'a=b; id=sesame'}", "sesame"),
    ("sent Bearer sesame-open to it", "sesame-open"),
]
URLS = [
    ("https://user:hunter2@spark.lan:8443/v1", "hunter2"),
    ("https://user:hun/ter2@spark.lan:8443/v1", "ter2"),
    ("https://user:hun@ter2@spark.lan:8443/v1", "ter2"),
    ("http://sesame@spark.lan/", "sesame"),
    ("socks5h://user:hunter2@proxy:1080", "hunter2"),
    ("redis://:hunter2@cache:6379/0", "hunter2"),
    ("postgres://app:hunter2@db/x", "hunter2"),
    ("postgresql+asyncpg://app:hunter2@db/x", "hunter2"),
    ("mongodb+srv://app:hunter2@db/x", "hunter2"),
    ("amqp://app:hunter2@mq", "hunter2"),
    ("git+https://user:hunter2@github.com/x", "hunter2"),
    ("index https://user:hunter2@github.com/simple", "hunter2"),
    ("jdbc:mysql://app:hunter2@db/x", "hunter2"),
    ("ftp://app:hunter2@files/x", "hunter2"),
    ("smtp%3A%2F%2Fapp%3Ahunter2%40mail", "hunter2"),
    ("postgres://db-7/x", "db-7"),
    ("s3://annas-bucket/x", "annas-bucket"),
    ("https://x.example.org/f?X-Amz-Signature=0af3", "0af3"),
    ("https://x.example.org/f?X-Amz-Credential=0af3&b=c", "0af3"),
    ("https://a.blob.core.windows.net/c?sv=2024&sig=ab%2Fcd%3D&se=1", "ab%2Fcd"),
    ("https://x.example.org/f?access_token=sesame&b=c", "sesame"),
    ("https://x.example.org/f?b=c&apikey=sesame", "sesame"),
    ("AccountName=x;AccountKey=" + X40 + X40 + "abcd1234==;EndpointSuffix=y", X40),
    ("Endpoint=sb://x;SharedAccessKeyName=n;SharedAccessKey=abcd1234=", "abcd1234"),
    ("https://hooks.slack.com/services/T0¦1/B0¦2/sesame01", "sesame01"),
]
MACHINES = [
    ("GPU-12345678-1234-1234-1234-123456789abc", "12345678"),
    ("UUID: gpu-12345678-1234-1234-1234-123456789abc", "12345678"),
    ("MIG-12345678-1234-1234-1234-123456789abc", "12345678"),
    ("MIG-GPU-12345678-1234-1234-1234-123456789abc/1/0", "12345678"),
    ("Serial Number: 1324522012345", "1324522012345"),
    ("machine-id=0123456789abcdef", "0123456789abcdef"),
    ("de:ad:be:ef:00:01", "be:ef"),
    ("DE-AD-BE-EF-00-01", "BE-EF"),
    ("dead.beef.0001", "beef"),
    ("dead-beef-0001", "beef"),
    ("mac=deadbeef0001", "deadbeef0001"),
    ("dead:beef:0001", "beef"),
    ("guid 0xdead:beef:0000:0001", "beef"),
    ("de:ad:be:ef:00:01:02:03", "be:ef"),
    ("at 192.168.1.77 now", "192.168.1.77"),
    ("fe80::a86b:69ff:fe67:e3fe%eth0", "a86b"),
    ("[2001:db8::1]:8000", "2001"),
    ("::ffff:192.168.1.9", "192.168"),
    ("gpu01.cluster.acme.com", "acme"),
    ("connect to spark.acme.org:5432", "acme"),
    ("from db-1.internal", "db-1"),
    ("ssh annas-pc.local", "annas"),
    ("nas.lan is up", "nas"),
    ("node7.hpc.uni-x.de", "uni-x"),
    ("ip-10-0-0-7.ec2.internal", "10-0-0-7"),
    ("head.acme.corp", "acme"),
    ("gpu-7.acme.io", "acme"),
    ("hostname: annas-spark", "annas-spark"),
    ('"hostname": "annas-spark"', "annas-spark"),
    ("anna@example.org", "anna"),
    ("ssh anna@spark7", "anna"),
    ("[anna@spark7 ~]$ ls", "anna"),
    ("USER=anna", "anna"),
    ("uid=1000(anna) gid=1000(anna)", "anna"),
    ("spark-3995:2981:2981 [0] NCCL INFO", "3995"),
]
PLACES = [
    ("/home/anna", "anna"),
    ("/home/anna/x/y", "anna"),
    ("/home/Änna/x/y", "Änna"),
    ("'/home/anna maria/x/y'", "maria"),
    ("-I/home/anna/include/x", "anna"),
    ("file:///home/anna/x/y", "anna"),
    ("/Users/anna/Library/x", "anna"),
    ("C:\\Users\\anna\\models", "anna"),
    ("C:\\\\Users\\\\anna\\\\models", "anna"),
    ("/mnt/c/Users/anna/x", "anna"),
    ("/var/home/anna/x", "anna"),
    ("/export/home/anna", "anna"),
    ("/data/users/anna", "anna"),
    ("/srv/people/anna", "anna"),
    ("/run/media/anna/disk/x", "anna"),
    ("/run/user/1000/anna/x", "1000"),
    ("%2Fhome%2Fanna%2Fx", "anna"),
    ('"\\/home\\/anna\\/x"', "anna"),
    ("~anna/models/x", "anna"),
    ("PATH=/srv/bin/a:/home/anna/b", "anna"),
]
SAMPLES = [
    *((f"it is {token} there", token.rpartition("¦")[2]) for token in TOKENS),
    *PAIRS,
    *FLAGS,
    *HEADERS,
    *URLS,
    *MACHINES,
    *PLACES,
]
SAMPLES = [(text.replace("¦", ""), secret) for text, secret in SAMPLES]

# Harmless in both degrees.
HARMLESS = [
    "sha256 of 0.7.0.post1",
    "sha256 94edc256424af38762eb31306eed28beb9f0efc50a8837492c9d6fd6004aed79",
    "sha256:f426805fdb3ce00c078a89b81d367134089dc3a03f3465c694a1a3c641ca1e76",
    "    --hash=sha256:94edc256424af38762eb31306eed28beb9f0efc50a8837492c9d6fd6004aed79 \\",
    'sha256 = "94edc256424af38762eb31306eed28beb9f0efc50a8837492c9d6fd6004aed79"',
    "at 5853b86c1d2e3f405162738495a6b7c8d9e0f1a2",
    'commit = "5853b86c1d2e3f405162738495a6b7c8d9e0f1a2"',
    "patch queue vllm-0.32.0: the image has 94edc256424a, the checkout 5853b86c1d2e",
    "sparkforge@sha256:94edc256424af38762eb31306eed28beb9f0efc50a8837492c9d6fd6004aed79",
    "0.7.0.post1",
    "vLLM 0.32.0, torch 2.13.0+cpu, FlashInfer 0.7.0.post1",
    "nvidia-cudnn-cu13==9.20.0.48",
    'version = "9.20.0.48"',
    "cuDNN 9.20.0.48",
    "nvidia_cudnn_cu13-9.20.0.48-py3-none-manylinux_2_27_aarch64.whl",
    "docker build --secret id=ca,src=ca.pem",
    "vllm==0.32.0+sparkforge.3",
    "driver 580.95.05, CUDA 13.0",
    "packaging>=26.3,<27",
    "torch-2.13.0-cp312-cp312-manylinux_2_28_aarch64.whl",
    "vllm-0.32.0.tar.gz",
    "--max-model-len 131072 --gpu-memory-utilization 0.75",
    "--quantization-config.moe.activation mxfp8",
    "--moe-backend flashinfer_cutlass",
    "--attention-backend FLASHINFER --served-model-name gpt-oss-120b",
    "--max-num-batched-tokens 8192 --tokenizer-mode auto",
    "--enable-prefix-caching --kv-cache-dtype fp8 --tensor-parallel-size 2",
    "docker run --user 1000:1000 -u 1000:1000 vllm",
    "./inv up --port 8000 --profile spark",
    "sm_121a compute_121a sm_90a",
    "FLASHINFER_CUDA_ARCH_LIST=12.1a",
    "TORCH_CUDA_ARCH_LIST=8.0 9.0a 12.1f",
    "-gencode arch=compute_121a,code=sm_121a",
    "NVIDIA GB10, compute capability 12.1",
    "MAX_JOBS=4 CUDA_HOME is set",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1",
    "torch.nn.functional",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.model_executor.layers.quantization.mxfp4",
    "spark_mxfp4.vllm.plugin:register",
    "flashinfer.fused_moe.core",
    "torch.distributed.elastic.multiprocessing.api",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "concurrent.futures.thread",
    "asyncio.run(main())",
    "threading.local",
    "self.model.forward",
    "module hf_experts, hf_overrides={}, hf_config",
    "numpy.typing, os.path.join, sys.exit",
    "config.json",
    "tokenizer.json tokenizer_config.json special_tokens_map.json",
    "model-00001-of-00015.safetensors",
    "pins.toml, locks/spark.txt, patches/vllm-0.32.0/series",
    "sparkforge/doctor/doctor.py:66",
    "docker-compose.cpu.yml",
    "libcudnn.so.9, libtorch_cpu.so",
    "moe_gemm_mxfp4.cu",
    "fused_moe_120.ninja",
    "api_server.py:1234 in run_server",
    "build.ninja README.md Dockerfile.dev",
    "583.1 tok/s/GPU",
    "1024/8192 c4",
    "2026-11-21T07:35:41+00:00",
    "INFO 11-21 03:40:12 [core.py:123] engine is ready",
    "04:22:15 listens on 0.0.0.0:8000 and [::1]:8000",
    "http://127.0.0.1:8000/v1",
    "http://localhost:8000/health",
    "max_tokens=8, token_ids=[1, 2], tokenizer=o200k",
    "eos_token_id=200002, bos_token='<|startoftext|>', pad_token=None",
    "first_token: 12.5 s, num_tokens: 128",
    "c10::Error in std::vector, at::Tensor",
    "bits per byte 1.0312, ratio 0.998",
    "KV cache size: 1,234,567 tokens",
    "api_key=None, ssl_keyfile=None, hf_token=None",
    "the API key is missing",
    "password required",
    "Authorization is required",
    "MXFP4 block of 32 values, E8M0 scale",
    "openai/gpt-oss-120b",
    "[1/5] build · wheel",
    "pypi-simple, detect-secrets, huggingface-hub",
    "github.com, huggingface.co",
    "Apache-2.0 OR MIT",
    "ghcr.io, nvcr.io",
    "kernel 6.14.0-1013-nvidia",
    "python3.12, cp312-abi3, aarch64-linux-gnu",
    "c++filt: _ZN4vllm3moe12topk_softmaxE",
    "primary_key=id, cache_key=abc, sort_keys=True",
]
# Harmless where somebody must still be able to read a log.
HARMLESS_FOR_SUPPORT = [
    'File "/usr/lib/python3.12/json/decoder.py", line 355',
    "/models/gpt-oss-120b/config.json",
    "https://github.com/vllm-project/vllm/issues/37030",
    "https://huggingface.co/openai/gpt-oss-120b",
    "GET /v1/models",
    "/dev/shm",
    "/opt/venv/bin/python",
    "/usr/local/cuda/bin/nvcc",
    "/opt/venv/lib/python3.12/site-packages/vllm/envs.py",
    "/proc/meminfo /sys/class/net",
]


REDACTORS = (redact.redact, redact.for_support)


def survives(text, secret, redacted):
    once = redacted(text)
    return secret in once or redacted(once) != once or secret in str(redacted({"line": [f"before\n{text}\nafter"]}))


def test_no_kind_of_secret_or_place_survives():
    assert [text for text, secret in SAMPLES if secret not in text] == []
    cases = [(text, secret, redacted) for text, secret in SAMPLES for redacted in REDACTORS]
    assert [case for case in cases if survives(*case)] == []


def test_harmless_lines_stay_readable():
    assert [redact.redact(text) for text in HARMLESS] == HARMLESS
    readable = [*HARMLESS, *HARMLESS_FOR_SUPPORT]
    assert [redact.for_support(text) for text in readable] == readable


@pytest.mark.parametrize(
    "value",
    [
        {"name": "API_KEY", "value": "sesame"},
        {"value": "sesame", "name": "DB_PASS"},
        ["api_key", "sesame"],
        ["--api-key", "first", "sesame", "--port", "1"],
        {"api_key": ["first", "sesame"]},
        {"credentials": {"user": "sesame", "level": 1}},
        {"env": ["A=b", "API_KEY=sesame"]},
        {"headers": [["authorization", "Bearer sesame"]]},
        {"Cookie": "a=sesame"},
        {"pin_code": 1, "password": "sesame"},
    ],
)
def test_neighbours_in_json_tell_a_secret(value):
    for redacted in (redact.redact, redact.for_support):
        assert "sesame" not in str(redacted(value))


@pytest.mark.slow
@pytest.mark.timeout(60, method="signal")  # `re` looks for signals while it searches
@pytest.mark.parametrize("character", "a7-_:/.@\\\"'& \n=,<é")
def test_redaction_takes_time_in_proportion_to_the_text(character):
    """Four times the text takes four times the processor's time; with a quadratic pattern it takes sixteen times."""
    redact.for_support("a")  # the patterns are compiled once

    def seconds(length):
        start = time.process_time()
        redact.for_support(character * length)
        return time.process_time() - start

    assert any(seconds(40_000) < 9 * seconds(10_000) for _ in range(3))


def test_the_token_rules_are_loaded_only_by_redaction():
    code = (
        "import sys, tasks, sparkforge.core.redact, sparkforge.doctor.support; print('detect_secrets' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert result.stdout == "False\n"
