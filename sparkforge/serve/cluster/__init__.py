"""One model over several machines: from cluster.toml to facts of all nodes, findings, and servers that end together.

In goes cluster.toml and what every node says about itself; out come findings, and vLLM's own multi-node engine running
on all nodes. The scheduler, the parallelism and the network traffic are vLLM's.
"""
