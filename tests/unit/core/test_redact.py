"""What leaves the machine, in a result or in a support archive, says neither who nor where."""

import getpass
import re
import socket

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparkforge.core import redact, redact_rules
from sparkforge.core.paths import ROOT

LEAKS = {
    "hf_ABCDEFGHIJ": "<token>",
    "Authorization: Bearer abc.def-ghi": "Authorization: Bearer <token>",
    "HF_TOKEN=verysecret rest": "HF_TOKEN=<token> rest",
    '"password": "hunter22"': '"password": "<token>"',
    "https://user:pw@spark.lan:8443/v1": "https://<host>/v1",
    "http://localhost.evil.org/": "http://<host>/",
    "at 192.168.1.77 now": "at <address> now",
    "fe80:0:0:0:1:2:3:4": "<address>",
    "/srv/people/anna/gpt-oss-120b": "<path>/gpt-oss-120b",
    "/home/anna": "<path>",
    "see ~/models/x/y": "see <path>/y",
    "anna@example.org": "<address>",
    "anna-maria.von.irgendwo+spark@mail.example.org": "<address>",
    "fe80::a86b:69ff:fe67:e3fe%eth0": "<address>",
    "2001:db8::1, then": "<address>, then",
    "::ffff:192.168.1.9": "<address>",
    "[1]enp2s0:fe80::a86b:69ff:fe67:e3fe<0>": "[1]enp2s0:<address><0>",
    "de:ad:be:ef:00:01": "<address>",
    "-I/home/anna/include/x": "-I<path>/x",
    "file:///home/anna/x/y": "file://<path>/y",
    "PATH=/srv/bin/a:/srv/bin/b": "PATH=<path>/a:<path>/b",
    "AWS_SECRET_ACCESS_KEY=abc/def": "AWS_SECRET_ACCESS_KEY=<token>",
    "'api_key': ['sesame-open']": "'api_key': ['<token>']",
    "vllm serve --api-key sesame --port 1": "vllm serve --api-key <token> --port 1",
    "https://x.example.org/f?X-Amz-Signature=0af3": "https://<host>/f?X-Amz-Signature=<token>",
    "spark-3995:2981:2981 [0] NCCL INFO": "<host>:2981:2981 [0] NCCL INFO",
    "(EngineCore pid=1) (Ray pid=2, ip=10.0.0.7) spark-3995:2:2 [0] NCCL": (
        "(EngineCore pid=1) (Ray pid=2, ip=<address>) <host>:2:2 [0] NCCL"
    ),
    "ssh anna-pc.local": "ssh <host>",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\nYWJj\n-----END OPENSSH PRIVATE KEY-----": "<token>",
}


@pytest.mark.parametrize("text", LEAKS)
def test_secrets_and_places_are_taken_out(text):
    assert redact.redact({"k": [text]}) == {"k": [LEAKS[text]]}
    assert redact.for_support(text) == LEAKS[text]


def test_a_traceback_keeps_its_place_in_the_package_and_loses_the_home():
    line = 'File "/home/anna/env/lib/python3.12/site-packages/vllm/v1/engine/core.py", line 7'
    assert redact.for_support(line) == 'File "<path>/site-packages/vllm/v1/engine/core.py", line 7'
    assert redact.for_support(f"{ROOT}/serve/doctor.py:3") == "<checkout>/serve/doctor.py:3"


def test_the_middle_of_a_key_goes_and_a_hash_stays():
    line = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW"
    digest = "f426805fdb3ce00c078a89b81d367134089dc3a03f3465c694a1a3c641ca1e76"
    assert redact.for_support(f"x\n{line}\n{digest}\n") == f"x\n<token>\n{digest}\n"


def test_this_machines_own_names_go(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "annas-spark.example.net")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    redacted = redact.for_support("anna@annas-spark: ssh annas-spark as anna, not susanna")
    assert "annas" not in redacted
    assert not re.search(r"\banna\b", redacted)
    assert "susanna" in redacted


def test_keys_flags_and_versions_in_json():
    value = {
        "HF_TOKEN": "x",
        "args": ["--api-key", "sesame", "--port", "8000"],
        "facts": {"cudnn.version": {"value": "9.20.0.48", "source": "10.0.0.7"}},
        "first_token": 12.5,
    }
    assert redact.for_support(value) == {
        "HF_TOKEN": "<token>",
        "args": ["--api-key", "<token>", "--port", "8000"],
        "facts": {"cudnn.version": {"value": "9.20.0.48", "source": "<address>"}},
        "first_token": 12.5,
    }


SECRETS = st.sampled_from(["/home/anna/secret", "hf_abcdefghij", "203.0.113.9", "https://spark.example.org/x"])
WORDS = ("anna", "hf_abcdefghij", "203.0.113.9", "spark.example.org")


@given(st.text(max_size=40), SECRETS, st.text(max_size=40))
def test_no_context_saves_a_leak(before, leak, after):
    for redacted in (redact.redact(f"{before} {leak} {after}"), redact.for_support(f"{before} {leak} {after}")):
        for word in WORDS:
            assert word not in redacted or word in before + after


@given(SECRETS, st.sampled_from(['"', "'", "=", "(", "[", "{", ",", "\n", "\t", "|", ">", "; "]))
def test_no_neighbour_saves_a_leak(leak, neighbour):
    for redacted in (redact.redact, redact.for_support):
        assert not [word for word in WORDS if word in redacted(f"x{neighbour}{leak}{neighbour}y")]


@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=40))
def test_whatever_stands_behind_a_named_key_goes(secret):
    assume(not redact_rules.NO_SECRET.fullmatch(secret))  # a word such as "required" says that there is none
    for text in (f"HF_TOKEN={secret}", f'{{"api_key": "{secret}"}}', f"--api-key {secret}", f"--hf-token={secret}"):
        assert secret not in redact.for_support(text)
    assert secret not in str(redact.for_support(["--api-key", secret]))


@given(st.text(max_size=200))
def test_redacting_twice_changes_nothing_more(text):
    once = redact.for_support(text)
    assert redact.for_support(once) == once
