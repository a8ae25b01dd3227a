"""A place that a person names, in every command that takes one."""

from pathlib import Path

import pytest

from bench import batch
from forge import offline
from serve import docker_device, doctor, embedded, hub
from serve.hub_mirror import Mirror
from sparkforge import paths
from sparkforge.errors import UsageError

NOBODY = "~nobody-has-this-name/x"


def test_a_home_is_found_and_a_relative_place_stays_one(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.typed("~/x") == tmp_path / "x"
    assert paths.typed("x") == Path("x")


@pytest.mark.parametrize(
    "named",
    [
        lambda: doctor.gather("", NOBODY),
        lambda: doctor.gather(NOBODY, ""),
        lambda: doctor.main(log="", state="", as_json=False, bundle=f"{NOBODY}.tar.gz"),
        lambda: embedded.check(NOBODY, ""),
        lambda: docker_device.variables(NOBODY, "", 8000),
        lambda: hub.fetch(None, Path(NOBODY)),
        lambda: Mirror(Path(NOBODY), "openai/gpt-oss-120b", ""),
        lambda: offline.use_bundle(NOBODY),
        lambda: batch.root(NOBODY),
    ],
    ids=["state", "log", "bundle", "model", "container", "to", "mirror", "offline", "output"],
)
def test_a_home_that_nobody_has_is_refused(named):
    with pytest.raises(UsageError, match="nobody-has-this-name"):
        named()
