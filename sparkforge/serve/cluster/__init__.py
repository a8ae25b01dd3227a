"""One model on several machines: cluster.toml, facts of all nodes, checks, and servers that end together.

The inputs are cluster.toml and the facts that every node reports; the results are findings, and vLLM's own multi-node
engine running on all nodes. The scheduler, the parallelism and the network traffic are vLLM's.
"""
