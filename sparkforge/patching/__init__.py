"""Patch queues: reading and applying them, their status on another release, rebase, authoring."""
