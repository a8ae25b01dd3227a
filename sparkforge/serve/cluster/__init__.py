"""One model on several machines by vLLM's own multi-node engine: cluster.toml, facts, checks, and servers."""
