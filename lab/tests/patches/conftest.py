"""The made-up upstream of the tests of patch queues."""

from tests.unit.patching.conftest import clone, world  # noqa: F401
