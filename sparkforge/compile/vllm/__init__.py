"""vLLM's extensions compiled for SM121, which replace those of upstream's wheel."""
