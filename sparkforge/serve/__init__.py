"""Start, stop and ask a server, embedded or in a container."""
