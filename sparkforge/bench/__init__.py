"""Measurements that anyone can repeat: an accuracy gate, then a load; each saves JSON with the machine's facts."""
