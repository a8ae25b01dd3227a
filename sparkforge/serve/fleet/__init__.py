"""Several models behind one URL: fleet.toml, the plan of their memory, the router, and the keeper process."""
