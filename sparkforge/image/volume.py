"""The container's cache of compiled kernels, used from the host: a volume, which only a container can read.

The commands run in the server's container if it runs, because they must see its processes; otherwise in a new container
of the same image with only the volume.
"""

import sys

from docker.errors import NotFound

from sparkforge.core import docker as docker_cli
from sparkforge.core import paths
from sparkforge.core.console import say
from sparkforge.core.process import call
from sparkforge.image import compose, engine
from sparkforge.image.devices import build_command

FOLDER = "/var/cache/sparkforge"
PYTHON = "/opt/venv/bin/python"
ALONE = (
    "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",  # noqa: S108 - in the container
    "--security-opt", "no-new-privileges:true", "--user", "1000:1000", "--env", f"SPARKFORGE_STATE={FOLDER}/state",
)  # fmt: skip


def run_cache(*cache_arguments: str) -> int:
    """Run `sparkforge.compile.cache` with these arguments on the volume of this checkout's project; return its code.

    Raises an engine's error, and EngineError if the volume exists without the image that reads it.
    """
    terminal = ["--interactive", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    command = ["-m", "sparkforge.compile.cache", *cache_arguments]
    with engine.connected() as client:
        container = engine.service_container(client, compose.project(), compose.SERVICE)
        current = engine.state(client, container) if container else None
        if container and current and current.runs:
            arguments = ["exec", *terminal, container, PYTHON, *command]
        else:
            resolved = compose.resolved({})
            service, volumes = compose.service_of(resolved), resolved.get("volumes") or {}
            volume = str((volumes.get(compose.CACHE) or {}).get("name") or f"{compose.project()}_{compose.CACHE}")
            try:
                client.volumes.get(volume)
            except NotFound:
                say(f"there is no volume {volume}: no container of this checkout has served yet")
                return 0
            here, build = engine.read(client).platform, build_command(service.stack)
            image = engine.require_image(client, service.image, here, build)
            mount = ["--volume", f"{volume}:{FOLDER}", "--entrypoint", PYTHON]
            arguments = ["run", *terminal, *ALONE, *mount, str(image.id), *command]
    return call([docker_cli.program(), *arguments], cwd=paths.ROOT, env={})
