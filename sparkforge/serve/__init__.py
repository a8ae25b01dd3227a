"""Start, stop and query a server, embedded or in a container."""
