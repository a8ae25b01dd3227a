"""Checkpoints: fetched from a hub, or tiny ones written here; the Harmony vocabulary."""
