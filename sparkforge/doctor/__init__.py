"""Diagnosis of a server or a build: problem, cause, and next command."""
