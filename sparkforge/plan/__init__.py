"""Plans: the memory that a model needs on a device, the workload that fits, and the highest possible speed."""
