"""Measurements of served models on GPUs, with weights of the real shapes."""
