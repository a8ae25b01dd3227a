"""vLLM's own extensions compiled for SM121 and laid over upstream's wheel."""
