"""The tag that an image's locks give it and its own name."""

from types import SimpleNamespace

import pytest

from sparkforge.image import build, registry, versions

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


@pytest.mark.parametrize(
    ("repository", "named"),
    [
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b"),
        ("docker.io/me/vllm", "me/vllm"),
        ("docker.io/library/vllm", "vllm"),
    ],
)
def test_the_digest_of_an_image_is_found_under_the_name_that_the_engine_gives_its_repository(repository, named):
    image = SimpleNamespace(attrs={"RepoDigests": ["other/vllm@sha256:0", f"{named}@sha256:1"]})
    assert registry._digest(image, repository) == "sha256:1"
