"""Facts about the machine, the software, the model and the kernels, each with its source."""
