"""The hardware ledger as data, and `./inv qualify`, which tests its claims on this machine."""
