"""Importing the architecture fails with any MAX but the pinned version."""

import pytest

from project import PROJECT
from spark_mxfp4.max import versions


def test_another_version_than_the_locks_is_refused(monkeypatch):
    assert f"\nmax=={versions.MAX} " in (PROJECT / "locks" / "max.txt").read_text()
    monkeypatch.setattr(versions, "version", lambda _name: "26.8.0")
    with pytest.raises(versions.UnknownMaxError, match=r"26\.8\.0 .* max==26\.7\.0"):
        versions.require_version()


def test_another_signature_is_refused():
    class Model:
        def graph_specs(self, model_config, more):
            pass

    versions.require_signature(Model, "graph_specs", "self", "model_config", "more")
    for name, message in (("graph_specs", r"graph_specs takes \(self, model_config, more\)"), ("gone", "gone")):
        with pytest.raises(versions.UnknownMaxError, match=message):
            versions.require_signature(Model, name, "self", "model_config")
