# A Debian whose process 1 is systemd, for test_service.py: what a machine has that starts a server at boot.
ARG BASE=docker.io/sparkforge-ci/debian:bookworm-slim
FROM ${BASE}
RUN apt-get -qq update \
    && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
        dbus dbus-user-session libpam-systemd procps python3 systemd systemd-sysv > /dev/null \
    && rm -rf /var/lib/apt/lists/*
STOPSIGNAL SIGRTMIN+3
CMD ["/sbin/init"]
