"""Which package index and certificates pip is configured with."""

from sparkforge.pins.index import PipConfig, pip_config


def test_the_environment_stands_before_pips_files(tmp_path, monkeypatch):
    for name in ("PIP_INDEX_URL", "PIP_CERT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("a", "c"):
        (tmp_path / name).write_text(f"[global]\nindex-url = http://{name}.test/simple/\ncert = /{name}.pem\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "a"))
    assert pip_config() == PipConfig("http://a.test/simple/", "/a.pem")
    monkeypatch.setenv("PIP_INDEX_URL", "http://b.test")
    assert pip_config() == PipConfig("http://b.test/", "/a.pem")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "c"))
    monkeypatch.delenv("PIP_INDEX_URL")
    assert pip_config() == PipConfig("http://c.test/simple/", "/c.pem")
