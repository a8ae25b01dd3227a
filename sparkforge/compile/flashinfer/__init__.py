"""FlashInfer's modules compiled ahead of time for SM121."""
