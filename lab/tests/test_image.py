"""What bench.image makes of file lists, an index and ranges; the measuring itself runs on a real engine."""

from types import SimpleNamespace

import httpx
import pytest

from lab import image
from sparkforge.core.errors import NetworkError, UsageError
from sparkforge.image.trimming import Cut

LOCK = """# made
alpha==1.0 \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
    # via beta
beta[extra]==2.0 \\
    --hash=sha256:{c}
""".format(a="a" * 64, b="b" * 64, c="c" * 64)


def entry(filename, digest):
    return SimpleNamespace(
        filename=filename, digests={"sha256": digest * 64}, url=f"https://x.test/{filename}#sha256=1"
    )


PAGES = {
    "alpha": [
        entry("alpha-1.0-cp313-cp313-manylinux_2_28_x86_64.whl", "a"),
        entry("alpha-1.0-cp313-cp313-manylinux_2_28_aarch64.whl", "b"),
        entry("alpha-1.0-cp313-cp313-manylinux_2_17_aarch64.whl", "d"),  # not locked
        entry("alpha-1.0.tar.gz", "a"),
    ],
    "beta": [entry("beta-2.0-py3-none-any.whl", "c")],
}


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setattr(image.index, "project_page", lambda name, _http: SimpleNamespace(packages=PAGES[name]))
    (tmp_path / "lock.txt").write_text(LOCK)
    return tmp_path / "lock.txt"


def test_each_package_has_the_wheel_of_the_machine_that_is_locked(lock):
    names = [url.rpartition("/")[2] for url in image.wheels(lock, "aarch64", None)]
    assert names == ["alpha-1.0-cp313-cp313-manylinux_2_28_aarch64.whl", "beta-2.0-py3-none-any.whl"]


def test_a_machine_that_nobody_builds_for_is_named(lock):
    with pytest.raises(NetworkError, match="no wheel of alpha fits", check=lambda error: error.code == "network.fetch"):
        image.wheels(lock, "riscv64", None)


def test_a_file_that_two_cuts_name_counts_once(monkeypatch):
    files = {"a/lib/cu12/x.so": 5, "a/lib/cu13/x.so": 7, "b/y.py": 11}
    monkeypatch.setattr(image, "wheel_files", lambda _lock: files)
    cuts = [Cut("old", ("*/lib/cu12",), ""), Cut("all", ("a",), "")]
    monkeypatch.setattr(image.trimming, "cuts", lambda _device: cuts)
    sizes = image.projection()
    assert (sizes["untrimmed"], sizes["bytes"], sizes["left out"]) == (23, 11, {"old": 5, "all": 7})
    assert "projection" in sizes


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_is_read_by_ranges_or_whole(ranges, monkeypatch):
    held, asked = bytes(range(256)), []

    def answer(request):
        asked.append(span := request.headers["Range"].removeprefix("bytes="))
        first, last = (int(span) + 256, 255) if span.startswith("-") else map(int, span.split("-"))
        if not ranges:
            return httpx.Response(200, content=held)
        headers = {"Content-Range": f"bytes {first}-{last}/256"}
        return httpx.Response(206, content=held[first : last + 1], headers=headers)

    monkeypatch.setattr(image, "TAIL", 100)
    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        file = image.Ranges(http, "https://x.test/a.whl")
        file.seek(-4, 2)
        assert file.read() == held[-4:]
        assert asked == ["-100"]
        file.seek(10)
        assert file.read(5) == held[10:15]
        assert file.tell() == 15


def test_without_the_tests_environment_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARKFORGE_STATE", str(tmp_path))
    monkeypatch.setattr(image, "build", lambda *_options: pytest.fail("it began"))
    with pytest.raises(UsageError, match="nothing to count with"):
        image.main(str(tmp_path / "out.json"))
