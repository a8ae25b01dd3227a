"""The dependencies that a build fetches by itself, read from CMake and Cargo files and compared with the pins."""

import os
import textwrap
from pathlib import Path

import pytest
from expected import refused

from lab.upstream import cmake, hidden
from sparkforge.pins import GitSource

COMMIT = "a" * 40


def read(text, name="CMakeLists.txt"):
    return cmake.read(textwrap.dedent(text), Path(name))


def declared(text):
    return [(dependency.name, dependency.repository, dependency.tag, dependency.override) for dependency in read(text)]


def test_a_plain_declaration_with_its_override():
    text = """
        # FetchContent_Declare(comment GIT_REPOSITORY x GIT_TAG y)
        #[[ FetchContent_Declare(block GIT_REPOSITORY x GIT_TAG y) ]]
        if (DEFINED ENV{THING_SRC_DIR})
          set(THING_SRC_DIR $ENV{THING_SRC_DIR})
        endif()
        if(THING_SRC_DIR)
          FetchContent_Declare(thing SOURCE_DIR ${THING_SRC_DIR})
        else()
          fetchcontent_declare(thing
            GIT_REPOSITORY https://example.org/thing.git
            GIT_TAG v1 # a comment ) in it
          )
        endif()
        FetchContent_MakeAvailable(thing)
    """
    assert declared(text) == [("thing", "https://example.org/thing.git", "v1", "THING_SRC_DIR")]
    assert read(text)[0].line == 10


def test_variables_are_followed_through_the_branches_that_go_together():
    text = """
        if(NOT DEFINED ENV{T_SRC_DIR})
          if(DEVICE STREQUAL "rocm")
            set(REPO "https://example.org/rocm.git")
            set(TAG "r1")
          else()
            set(REPO [[https://example.org/cuda.git]])
            set(TAG "c1")
          endif()
          FetchContent_Declare(t GIT_REPOSITORY ${REPO} GIT_TAG ${TAG})
        endif()
        set(TAG later)
    """
    assert declared(text) == [
        ("t", "https://example.org/cuda.git", "c1", "T_SRC_DIR"),
        ("t", "https://example.org/rocm.git", "r1", "T_SRC_DIR"),
    ]


def test_archives_and_downloads_by_url_are_found_too():
    archive = "ExternalProject_Add(z URL https://example.org/z.tgz URL_HASH SHA256=00)\n"
    clone = "FetchContent_Populate(p SOURCE_DIR d GIT_REPOSITORY https://example.org/p.git GIT_TAG v2)"
    rows = [("z", "https://example.org/z.tgz", "SHA256=00"), ("p", "https://example.org/p.git", "v2")]
    assert [row[:3] for row in declared(archive + clone)] == rows


V = "".join(f"set(V{name} {value})\n" for name in range(5) for value in range(10))
UNFOLLOWED = {
    "too many values": V + "FetchContent_Declare(a GIT_REPOSITORY ${V0}${V1}${V2}${V3}${V4} GIT_TAG c)",
    "unknown variable": "FetchContent_Declare(x GIT_REPOSITORY https://e.org/x GIT_TAG ${NOWHERE})",
    "no tag": "FetchContent_Declare(x GIT_REPOSITORY https://e.org/x)",
    "a shorthand": 'CPMAddPackage("gh:a/b#1")',
    "an unknown keyword": "FetchContent_Declare(x SOMETHING https://e.org/x)",
    "a download": "file(DOWNLOAD https://e.org/x ${CMAKE_BINARY_DIR}/x)",
    "a clone": "execute_process(COMMAND git clone https://e.org/x)",
    "curl": "add_custom_command(OUTPUT x COMMAND /usr/bin/curl -O https://e.org/x)",
    "no CMake": 'set(x "unclosed',
    "a bracket too many": ")\nFetchContent_Declare(",
    "an open command": "set(a",
    "a download without arguments": "file(DOWNLOAD)",
}


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_unresolvable_declarations_are_errors_with_file_and_line(name):
    with refused("input.pins", "combinations" if name == "too many values" else r"CMakeLists\.txt"):
        read(UNFOLLOWED[name])


def pin(**changes):
    values = {
        "of": "c", "asked_in": "CMakeLists.txt", "dependency": "thing", "repository": "https://e.org/thing.git",
        "tag": COMMIT, "commit": COMMIT, "tree": "unknown", "size": "unknown", "licence": "MIT", "needed": True,
        "why": "w", "src_dir": "THING_SRC_DIR",
    }  # fmt: skip
    return GitSource(**{**values, **changes})


def tree(tmp_path, more=""):
    (tmp_path / "CMakeLists.txt").write_text(
        "if(NOT THING_SRC_DIR)\n"
        f"FetchContent_Declare(thing GIT_REPOSITORY https://e.org/thing.git GIT_TAG {COMMIT})\nendif()\n{more}\n"
    )
    return tmp_path


def check(folder, **pins):
    hidden.check(hidden.declared(folder), "upstream 1", pins)


NEW = "FetchContent_Declare(newcomer GIT_REPOSITORY https://e.org/new.git GIT_TAG v9)"
WRONG = {  # case: the pins, more text of CMakeLists.txt, the error
    "another tag": ({"thing": pin(tag="b" * 40, commit="b" * 40)}, "", "is pinned as thing at bbbb"),
    "another repository": (
        {"thing": pin(repository="https://e.org/fork.git")},
        "",
        "repository https://e.org/fork.git",
    ),
    "another variable": ({"thing": pin(src_dir="OTHER_SRC_DIR")}, "", "override variable OTHER_SRC_DIR"),
    "another file": ({"thing": pin(asked_in="cmake/x.cmake")}, "", "is not in pins.toml.*does not ask for"),
    "no pin": (
        {"thing": pin()},
        NEW,
        r"newcomer v9 from https://e.org/new.git \(CMakeLists.txt:4\) is not in pins.toml",
    ),
    "no dependency": ({"thing": pin(), "old": pin(tag="v1", commit="unknown")}, "", r"pins.toml has old at v1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_pin_or_a_dependency_without_an_equal_counterpart_is_refused(tmp_path, name):
    pins, more, message = WRONG[name]
    with refused("input.pins", message):
        check(tree(tmp_path, more=more), **pins)


def test_crates_from_git_are_found_at_the_commit_of_the_lock(tmp_path):
    (tmp_path / "rust").mkdir()
    (tmp_path / "rust/Cargo.lock").write_text(f"""
version = 4
[[package]]
name = "plain"
version = "1.0.0"
source = "registry+https://github.com/rust-lang/crates.io-index"
[[package]]
name = "odd"
version = "1.0.0"
source = "git+https://e.org/odd?tag=v1#{COMMIT}"
""")
    crates = hidden.declared(tmp_path)
    assert [(crate.name, crate.repository, crate.tag, crate.file) for crate in crates] == [
        ("odd", "https://e.org/odd", COMMIT, "rust/Cargo.lock")
    ]
    check(tmp_path, odd=pin(dependency="odd", asked_in="rust/Cargo.lock", repository="https://e.org/odd", src_dir=None))


BROKEN_LOCKS = (b"\xff", b"package = 1", b"[[package]]\nsource = 'git+x#y'", b"[[package]]\nname = 1",
                b"a = " + b"[" * 5000, b"package = [1]")  # fmt: skip


@pytest.mark.parametrize("data", BROKEN_LOCKS)
def test_a_cargo_lock_that_cannot_be_read_is_refused(tmp_path, data):
    """Such a lock may hide a crate from git."""
    (tmp_path / "Cargo.lock").write_bytes(data)
    with refused("input.pins", r"Cargo\.lock"):
        hidden.declared(tmp_path)


def test_special_files_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "CMakeLists.txt")
    with refused("input.pins", "CMakeLists"):
        hidden.declared(tmp_path)
    (tmp_path / "CMakeLists.txt").unlink()
    (tmp_path / "Cargo.lock").mkdir()
    with refused("input.pins", "Cargo"):
        hidden.declared(tmp_path)
