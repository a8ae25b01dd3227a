"""Measurements that anyone can repeat; each saves JSON with the machine's facts.

In: a running server (an OpenAI API) and `baselines.toml`. Out: results as `result.schema.json` describes them, and a
report. `runs` calls the parts in order: the accuracy gate (`gate`), then the load (`measure`), then the report.
"""
