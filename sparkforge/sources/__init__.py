"""From pins to files on disk: fetched archives, git checkouts, Python environments and offline bundles."""
