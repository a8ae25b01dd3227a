"""Results and support archives name no user, host, address or path, and hold no secret."""

import re
import time
import tomllib
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sparkforge.core import redact
from sparkforge.core.paths import ROOT

SAMPLES = tomllib.loads(Path(__file__).with_name("redact_samples.toml").read_text(encoding="utf-8").replace("¦", ""))
# The replacement for each kind of secret; the samples in redact_samples.toml only test that the secret is removed.
REPLACED = {
    "Authorization: Bearer abc.def-ghi": "Authorization: Bearer <token>",
    "HF_TOKEN=verysecret rest": "HF_TOKEN=<token> rest",
    "'api_key': ['sesame-open']": "'api_key': [<token>]",
    "https://user:pw@spark.lan:8443/v1": "https://<host>/v1",
    "https://x.example.org/f?X-Amz-Signature=0af3": "https://<host>/f?X-Amz-Signature=<token>",
    "vllm serve --api-key sesame --port 1": "vllm serve --api-key <token> --port 1",
    "/srv/people/anna/gpt-oss-120b": "<path>/gpt-oss-120b",
    "PATH=/srv/bin/a:/srv/bin/b": "PATH=<path>/a:<path>/b",
    f"{ROOT}/serve/doctor.py:3": "<checkout>/serve/doctor.py:3",
    '"/home/anna/env/lib/python3.12/site-packages/vllm/x.py", line 7': '"<path>/site-packages/vllm/x.py", line 7',
    "anna-maria.von.irgendwo+spark@mail.example.org": "<address>",
    "[1]enp2s0:fe80::a86b:69ff:fe67:e3fe<0>": "[1]enp2s0:<address><0>",
    "(EngineCore pid=1) (Ray pid=2, ip=10.0.0.7) spark-3995:2:2 [0] NCCL": (
        "(EngineCore pid=1) (Ray pid=2, ip=<address>) <host>:2:2 [0] NCCL"
    ),
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\nYWJj\n-----END OPENSSH PRIVATE KEY-----": "<token>",
    "x\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW\n": "x\n<token>\n",
}


@pytest.mark.parametrize("text", REPLACED)
def test_secrets_and_places_are_replaced_and_the_rest_stays(text):
    assert redact.for_support({"k": [text]}) == {"k": [REPLACED[text]]}
    assert redact.for_support(text) == REPLACED[text]


def test_no_kind_of_secret_or_place_survives():
    samples = [(text, secret) for group in SAMPLES["secrets"].values() for text, secret in group]
    assert len(samples) > 200
    assert [text for text, secret in samples if secret not in text] == []
    redacted = redact.for_support
    assert [text for text, secret in samples if secret in redacted(text)] == []
    assert [text for text, secret in samples if secret in str(redacted({"line": [f"x\n{text}\ny"]}))] == []
    assert [text for text in (redacted(text) for text, _ in samples) if redacted(text) != text] == []


def test_harmless_lines_stay_readable():
    harmless = SAMPLES["harmless"]["everywhere"]
    assert [redact.for_support(text) for text in harmless] == harmless
    readable = [*harmless, *SAMPLES["harmless"]["for_support"]]
    assert [redact.for_support(text) for text in readable] == readable


def test_this_machines_own_names_go(set_hostname, monkeypatch):
    set_hostname("annas-spark.example.net")
    monkeypatch.setenv("LOGNAME", "anna")
    redacted = redact.for_support("anna@annas-spark: ssh annas-spark as anna, not susanna")
    assert "annas" not in redacted
    assert not re.search(r"\banna\b", redacted)
    assert "susanna" in redacted


@pytest.mark.parametrize(
    "value",
    [
        {"name": "API_KEY", "value": "sesame"}, {"value": "sesame", "name": "DB_PASS"},
        ["--api-key", "first", "sesame", "--port", "1"], {"api_key": ["first", "sesame"]},
        {"api_keys": {"prod": {"value": ["-sesame"]}}}, {"env": ["A=b", "API_KEY=sesame"]},
        {"headers": [["authorization", "Bearer sesame"]]},
    ],
)  # fmt: skip
def test_secrets_are_recognised_by_neighbouring_keys_in_json(value):
    assert "sesame" not in str(redact.for_support(value))


SECRETS = st.sampled_from(["/home/anna/secret", "hf_abcDefghij", "203.0.113.9", "https://spark.example.org/x"])
WORDS = ("anna", "hf_abcDefghij", "203.0.113.9", "spark.example.org")


@given(st.text(max_size=40), SECRETS, st.text(max_size=40))
def test_no_context_saves_a_leak_and_redacting_twice_changes_nothing_more(before, leak, after):
    once = redact.for_support(f"{before} {leak} {after}")
    assert not [word for word in WORDS if word in once and word not in before + after]
    assert redact.for_support(once) == once


@example("000000PW")  # itself a name of a secret
@given(st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=8, max_size=40))
def test_what_follows_a_named_key_is_removed(secret):
    assume(not redact.NO_SECRET.fullmatch(secret))  # words such as "required" are not secrets
    for text in (f"HF_TOKEN={secret}", f'{{"api_key": "{secret}"}}', f"--api-key {secret}", f"--hf-token={secret}"):
        assert secret not in redact.for_support(text)
    assert secret not in str(redact.for_support(["--api-key", secret]))


@pytest.mark.slow
@pytest.mark.timeout(60, method="signal")  # `re` looks for signals while it searches
@pytest.mark.parametrize(
    "piece", [*"a7-_:/.@\\\"'& \n=,<é", "a-", "/a", "a:", "a@", "1.", "a=", "key ", "-u ", "token>", "%3D"]
)
def test_redaction_takes_time_in_proportion_to_the_text(piece):
    """Four times the text takes four times the processor's time; with a quadratic pattern it takes sixteen times."""
    redact.for_support("a")  # the patterns are compiled once

    def seconds(length):
        start = time.process_time()
        redact.for_support((piece * length)[:length])
        return time.process_time() - start

    assert any(seconds(40_000) < 9 * seconds(10_000) for _ in range(3))
