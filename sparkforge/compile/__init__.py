"""From patched sources to machine code for SM121: jobs within memory, the toolchain, ninja, caches."""
