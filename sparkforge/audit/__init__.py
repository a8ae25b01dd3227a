"""Judge the machine code for SM121 in binaries, kernel by kernel."""
