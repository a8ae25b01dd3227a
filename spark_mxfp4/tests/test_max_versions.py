"""Importing the architecture fails with any MAX but the pinned version."""

import pytest

from project import PROJECT
from spark_mxfp4.max import versions


def test_the_lock_has_the_version_that_the_code_expects():
    assert f"\nmax=={versions.MAX} " in (PROJECT / "locks" / "max.txt").read_text()


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(versions, "version", lambda _name: "26.8.0")
    with pytest.raises(versions.UnknownMaxError, match=r"26\.8\.0 .* max==26\.7\.0"):
        versions.require_version()


def test_another_signature_is_refused():
    class Model:
        def graph_specs(self, model_config, more):
            pass

    versions.require_signature(Model, "graph_specs", "self", "model_config", "more")
    with pytest.raises(versions.UnknownMaxError, match=r"Model\.graph_specs takes \(self, model_config, more\)"):
        versions.require_signature(Model, "graph_specs", "self", "model_config")
    with pytest.raises(versions.UnknownMaxError, match="gone"):
        versions.require_signature(Model, "gone", "self")
