"""Build side: pins, fetch, patch, environments; later toolchain, compile, audit, image."""
