"""Container images: the root filesystem, the build, trimming, reproducibility, and the manifest of an image."""
