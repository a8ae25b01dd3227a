"""The programs that tests run, and what installs each; tests/packages installs them all on Debian."""

import os
import shutil
import subprocess

import pytest

PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "bash": "bash", "c++": "g++", "cc": "gcc", "cmake": "cmake",
    "docker-registry": "docker-registry", "dpkg": "dpkg", "git": "git", "ip": "iproute2", "iptables": "iptables",
    "ninja": "ninja-build", "npm": "npm", "nsenter": "util-linux", "openssl": "openssl", "patch": "patch",
    "readelf": "binutils", "rsync": "rsync", "ssh": "openssh-client", "ssh-keygen": "openssh-client",
    "sshd": "openssh-server", "systemd-analyze": "systemd", "zsh": "zsh",
}  # fmt: skip
INSTALL = {program: f"sudo apt install {package}" for program, package in PACKAGES.items()}
INSTALL["nvcc"] = "./inv build --only toolchain"


def require(program):
    """Return the path of `program`. If it is missing, skip the test with the command to install it, or fail on CI."""
    message = f"{program} is not installed: {INSTALL[program]}"  # a missing entry fails where the program is, too
    path = shutil.which(program)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)
    return path


def write_files(folder, files):
    """Write {path: text, bytes, or None for no file} under `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        if content is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_program(path, script):
    """Write an executable shell script, or another program if it begins with `#!`; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script if script.startswith("#!") else f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def compile_library(path, source, *flags, language="c++"):
    """Compile a shared library from a text in C++, C or assembler, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [require("cc" if language == "c" else "c++"), "-shared", "-fPIC", *flags, "-x", language, "-", "-o", path]
    subprocess.run(command, input=source, check=True, capture_output=True, text=True)
    return path
