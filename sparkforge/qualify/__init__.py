"""The hardware ledger as data, and `./inv qualify`, which runs what settles its claims on this machine."""
