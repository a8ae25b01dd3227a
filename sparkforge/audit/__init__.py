"""From binaries to a verdict: what machine code they hold for SM121, kernel by kernel."""
