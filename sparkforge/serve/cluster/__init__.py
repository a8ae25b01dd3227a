"""One model over several machines, from cluster.toml and facts of all nodes; vLLM's multi-node engine does the rest."""
