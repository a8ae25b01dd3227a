"""The tag that an image's locks give it, and which images may go."""

from types import SimpleNamespace

import pytest

from sparkforge.core import errors
from sparkforge.image import build, registry, versions
from sparkforge.image.versions import LocalImage

NAME = "sparkforge/vllm:spark"


def manifest(**changes):
    held = build.expected("arm64", stack="spark")
    return {"stack": "spark", "packages": {"vllm": "0.32.0+sparkforge.2"}, **held, **changes}


def test_the_version_is_made_of_vllm_the_lock_and_the_patches_alone():
    version = versions.version(manifest())
    assert version.startswith("spark-0.32.0-")
    assert len(version.rpartition("-")[2]) == 12
    assert versions.version({**manifest(), "kernels": {"xqa": "f" * 64}, "key": "other"}) == version
    reordered = {key: dict(reversed(value.items())) for key, value in build.expected("arm64", stack="spark").items()}
    assert versions.version(manifest(**reordered)) == version
    assert versions.version(manifest(lock={"spark": "0" * 64})) != version
    assert versions.version(manifest(patches={})) != version


def test_two_images_of_one_version_have_names_of_their_own():
    version = versions.version(manifest())
    first, second = (versions.own_name(version, f"sha256:{digit * 64}") for digit in "ab")
    assert first == f"{version}-aaaaaaaaaaaa"
    assert first != second


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (NAME, ("sparkforge/vllm", "spark")),
        ("127.0.0.1:5000/a/b:c", ("127.0.0.1:5000/a/b", "c")),
        ("127.0.0.1:5000/a/b", ("127.0.0.1:5000/a/b", "latest")),
    ],
)
def test_a_registrys_port_is_no_tag(name, parts):
    assert versions.split(name) == parts


def images(*holds):
    return [LocalImage(f"sha256:{number}", (), (), "", 1, why) for number, why in enumerate(holds)]


def test_of_the_images_that_nothing_holds_the_newest_stay():
    held = images("", "Compose serves it", "", "", "known good", "")
    assert [image.id for image in versions.to_remove(held, 2)] == ["sha256:3", "sha256:5"]
    assert [image.id for image in versions.to_remove(held, 0)] == ["sha256:0", "sha256:2", "sha256:3", "sha256:5"]
    assert versions.to_remove(held, 9) == []


class FakeImage:
    def __init__(self, id_, *tags, digests=(), tagged="2026-01-01T00:00:00Z"):
        self.id, self.tags = id_, list(tags)
        self.attrs = {"Size": 5, "RepoDigests": list(digests), "Created": "2025", "Metadata": {"LastTagTime": tagged}}


class FakeClient:
    """What an engine lists: images and one container."""

    def __init__(self, *listed, used=""):
        self.images = self
        self.api = self
        self.listed, self.used = listed, used

    def list(self, filters):
        assert filters == {"label": "org.sparkforge.stack=spark"}
        return self.listed

    def containers(self, all):  # noqa: A002 (the SDK's name)
        assert all
        return [{"ImageID": self.used, "Id": "c0ffee" * 10}]


def test_what_holds_an_image_is_said_and_the_newest_is_first():
    client = FakeClient(
        FakeImage("a", NAME, "sparkforge/vllm:spark-0.32.0-1"),
        FakeImage("b", "sparkforge/vllm:spark-0.32.0-2", tagged="2026-03-01T00:00:00Z"),
        FakeImage("c", "sparkforge/vllm:spark-0.32.0-3", tagged="2026-02-01T00:00:00Z"),
        FakeImage("d", "mine/vllm:kept"),
        FakeImage("e"),
        used="c",
    )
    held = {image.id: image.why for image in versions.local_images(client, "spark", NAME, {"b": "known good"})}
    assert list(held)[:2] == ["b", "c"]
    assert held == {
        "a": "Compose serves it",
        "b": "known good",
        "c": "container c0ffeec0ffee uses it",
        "d": "you named it mine/vllm:kept",
        "e": "",
    }


def test_how_many_old_images_stay_is_a_setting(monkeypatch):
    assert versions.kept_number("") == 3
    monkeypatch.setenv("SPARKFORGE_KEEP_IMAGES", "5")
    assert versions.kept_number("") == 5
    assert versions.kept_number("0") == 0
    with pytest.raises(errors.UsageError, match="is no number"):
        versions.kept_number("-1")


@pytest.mark.parametrize(
    ("repository", "named"),
    [
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b"),
        ("docker.io/me/vllm", "me/vllm"),
        ("index.docker.io/me/vllm", "me/vllm"),
        ("me/vllm", "me/vllm"),
        ("docker.io/library/vllm", "vllm"),
    ],
)
def test_the_digest_of_an_image_is_found_under_the_name_that_the_engine_gives_its_repository(repository, named):
    image = SimpleNamespace(attrs={"RepoDigests": ["other/vllm@sha256:0", f"{named}@sha256:1"]})
    assert registry._digest(image, repository) == "sha256:1"
