#!/usr/bin/env bash
# A private Docker engine with buildx and Compose, from Debian packages, on a Debian 12 machine without an image registry.
#
#   tests/engine/engine.sh start [STORE]   install, start, make the base image; STORE: overlay2 (default) or containerd
#   tests/engine/engine.sh env             print what a shell needs to use it: eval "$(tests/engine/engine.sh env)"
#   tests/engine/engine.sh stop            end it and remove its data; the base images stay in the cache. ENGINE_KEEP=1
#                                          keeps the images and the latest $KEEP_CACHE of the build cache, because
#                                          20 GB of small files take minutes to remove
#   tests/engine/engine.sh held            print the size of its data in GB
#
# It needs root. The product does not use this file: its Dockerfile and Compose files run unmodified. This script replaces
# a registry: debootstrap makes the base images, and tests/engine/ci.yml names them in place of the digests.
set -euo pipefail
# Use the machine's own runc and tini, because Debian 13's need a newer libc than Debian 12 has.
PATH=/usr/sbin:/usr/bin:/sbin:/bin

cache=${XDG_CACHE_HOME:-$HOME/.cache}/sparkforge/engine
place=${SPARKFORGE_ENGINE:-/var/tmp/sparkforge-engine}
root=$cache/root
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' | sed -n 's,/debian/$,,p' | head -n 1)}/debian
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
packages=(docker.io docker-cli docker-buildx docker-compose containerd prometheus prometheus-node-exporter qemu-user
    docker-registry)
# The base images of a run: SUITE-ARCHITECTURE.
machine=$(dpkg --print-architecture)
bases=("bookworm-$machine")
[ -z "${ENGINE_CUDA:-}${ENGINE_ARM64:-}" ] || bases+=("trixie-$machine")
[ -z "${ENGINE_ARM64:-}" ] || bases+=(trixie-arm64)
binfmt=/proc/sys/fs/binfmt_misc
KEEP_CACHE=10GB  # kept of the build cache with ENGINE_KEEP=1: the embedded image's stages, twice

# Run apt for Debian 13 with its own folders, because Debian 12's Docker has no `additional_contexts` for Compose.
apt13() {
    local work=$cache/apt
    mkdir -p "$work"/{lists/partial,cache/archives/partial,etc}
    touch "$work/status"
    echo "deb [signed-by=$keyring] $mirror trixie main" > "$work/etc/sources.list"
    apt-get -qq -o Dir::State="$work" -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status" \
        -o Dir::Cache="$work/cache" -o Dir::Etc="$work/etc" -o Dir::Etc::sourcelist="$work/etc/sources.list" \
        -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::parts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o APT::Sandbox::User=root "$@"
}

install_engine() {
    if ! { command -v debootstrap && command -v iptables && command -v runc && command -v tini; } > /dev/null; then
        apt-get -qq update
        apt-get -qq install --yes --no-install-recommends debootstrap iptables runc tini > /dev/null
    fi
    [ "$(cat "$root/.complete" 2> /dev/null)" != "${packages[*]}" ] || return 0
    rm -rf "$root"
    mkdir -p "$root" "$cache/debs"
    apt13 update
    (cd "$cache/debs" && rm -f ./*.deb && apt13 download "${packages[@]}")
    for package in "$cache"/debs/*.deb; do
        dpkg -x "$package" "$root"
    done
    rm -rf "$cache/debs" "$cache/apt"
    echo "${packages[*]}" > "$root/.complete"
}

# Let the kernel run arm64 programs by qemu. Flag F: the kernel opens qemu now, so that containers need no copy of it.
emulate_arm64() {
    [ -e $binfmt/register ] || mount -t binfmt_misc binfmt_misc $binfmt
    [ ! -e $binfmt/sparkforge-aarch64 ] || return 0
    local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
    local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
    echo ":sparkforge-aarch64:M::$magic:$mask:$root/usr/bin/qemu-aarch64:F" > $binfmt/register
}

# Make a suite's base with the packages of the official image, debootstrap's minbase.
make_base() {
    local suite=${1%-*} architecture=${1#*-} tarball=$cache/$1.tar
    [ ! -f "$tarball" ] || return 0
    local work
    work=$(mktemp -d "$cache/base.XXXXXX")
    debootstrap --variant=minbase --arch="$architecture" "$suite" "$work/$1" "$mirror" > "$cache/debootstrap-$1.log"
    rm -rf "$work/$1"/var/{cache/apt/archives/*.deb,lib/apt/lists/*,log/*}
    tar --sort=name --numeric-owner -C "$work/$1" -cf "$tarball.part" .
    mv "$tarball.part" "$tarball"
    rm -rf "$work"
}

# Import a base as an image: trixie-slim, or trixie-slim-arm64 on a machine of another architecture.
import_base() {
    local suite=${1%-*} architecture=${1#*-}
    local name=sparkforge-ci/debian:$suite-slim
    [ "$architecture" = "$machine" ] || name=$name-$architecture
    docker image inspect "$name" > /dev/null 2>&1 \
        || docker import --platform "linux/$architecture" "$cache/$1.tar" "$name" > /dev/null
}

start() {
    local store=${1:-overlay2}
    install_engine
    [ -z "${ENGINE_ARM64:-}" ] || emulate_arm64
    for base in "${bases[@]}"; do make_base "$base"; done
    mkdir -p "$place"/{data,bin,config/cli-plugins}
    ln -sf "$(command -v runc)" "$place/bin/runc"
    ln -sf "$(command -v tini)" "$place/bin/docker-init"
    ln -sf "$root"/usr/libexec/docker/cli-plugins/* "$place/config/cli-plugins/"
    # With this file the engine accepts a GPU reservation; there is no GPU (docs/concepts/images.md).
    printf '#!/bin/sh\nexit 0\n' > "$place/bin/nvidia-container-runtime-hook"
    chmod +x "$place/bin/nvidia-container-runtime-hook"
    cat > "$place/daemon.json" <<EOF
{"data-root": "$place/data", "exec-root": "$place/exec", "pidfile": "$place/docker.pid",
 "hosts": ["unix://$place/docker.sock"], "log-level": "warn", "bip": "172.28.0.1/24",
 "features": {"containerd-snapshotter": $([ "$store" = containerd ] && echo true || echo false)},
 "default-address-pools": [{"base": "172.27.0.0/16", "size": 24}]}
EOF
    PATH=$place/bin:$root/usr/bin:$root/usr/sbin:$PATH setsid dockerd --config-file "$place/daemon.json" \
        > "$place/dockerd.log" 2>&1 < /dev/null &
    eval "$(environment)"
    for _ in $(seq 120); do
        docker version > /dev/null 2>&1 && break
        sleep 0.5
    done
    docker version > /dev/null || { tail -20 "$place/dockerd.log" >&2; exit 1; }
    for base in "${bases[@]}"; do import_base "$base"; done
}

environment() {
    echo "export SPARKFORGE_ENGINE=$place DOCKER_HOST=unix://$place/docker.sock DOCKER_CONFIG=$place/config PATH=$root/usr/bin:\$PATH"
}

held() {
    [ ! -e "$place/data" ] || du --one-file-system --block-size=1G --summarize "$place/data" | cut -f 1
}

# `docker system prune` would remove every stage of the build cache that is not a layer of an image.
prune() {
    docker container prune --force &&
        docker image prune --force &&
        docker volume prune --force &&
        docker builder prune --force --keep-storage "$KEEP_CACHE"
}

stop() {
    if [ -f "$place/docker.pid" ]; then
        local pid
        pid=$(cat "$place/docker.pid")
        eval "$(environment)"
        docker ps -q 2> /dev/null | xargs -r docker stop -t 5 > /dev/null
        if [ -n "${ENGINE_KEEP:-}" ] && docker version > /dev/null 2>&1; then
            prune > "$place/prune.log" 2>&1 || { echo "unused data were not removed:" && tail -3 "$place/prune.log"; } >&2
        fi
        kill "$pid" 2> /dev/null || true
        for _ in $(seq 60); do kill -0 "$pid" 2> /dev/null || break; sleep 0.5; done
    fi
    { grep -o " ${place}[^ ]*" /proc/self/mounts || true; } | tac | xargs -r umount -l
    # Rename first: an engine must not start on a partly removed store. Also remove what a killed stop left.
    [ -n "${ENGINE_KEEP:-}" ] || [ ! -e "$place" ] || mv "$place" "$place.removed.$$"
    rm -rf "$place".removed.*
    [ ! -e $binfmt/sparkforge-aarch64 ] || echo -1 > $binfmt/sparkforge-aarch64
}

case ${1:-} in
start | stop | held) "$@" ;;
env) environment ;;
*) sed -n '2,10p' "$0" && exit 2 ;;
esac
