"""Measurements that anyone can repeat; each saves JSON with the machine's facts.

The input is a running server (an OpenAI API) and `baselines.toml`; the output is results in the format of
`result.schema.json`, and a report. `runs` calls the parts in order: the accuracy gate (`gate`), then the load
(`measure`), then the report.
"""
