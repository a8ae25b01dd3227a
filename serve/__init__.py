"""Run side: device choice, models on disk, launch and stop, client."""
