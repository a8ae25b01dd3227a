"""Measurements that anyone can run; each saves JSON with the machine's facts."""
