"""What a model needs of a device, what fits, and how fast it can be at best."""
