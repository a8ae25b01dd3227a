"""One model on several machines with vLLM's multi-node engine: cluster.toml, facts, checks, and servers."""
