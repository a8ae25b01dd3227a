"""Container images: the root filesystem, the build, trimming, reproducibility, and what an image says of itself."""
