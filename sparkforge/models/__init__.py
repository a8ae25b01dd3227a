"""Checkpoints, fetched from a hub or written here (the tiny ones), and the Harmony vocabulary."""
