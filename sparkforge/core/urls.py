"""URLs with a user's name and password in them, which pip's index and proxies may have."""

import re

HIDDEN = "***"
# A password may hold an unescaped @, /, ? or #. After a colon that does not begin a port, it ends at the last @.
USER_INFO = re.compile(
    r"(?<=://)(?:[^\s:/?#\"'<>@]{0,128}:(?!\d{1,5}(?:[/?#]|$))[^\s\"'<>]{0,256}@"
    r"|[^\s/?#\"'<>@]{0,256}@(?=[^\s/?#\"'<>]))"
)


def without_passwords(text: str) -> str:
    """Return `text` with `***` in place of each URL's user and password."""
    return USER_INFO.sub(f"{HIDDEN}@", text) if "://" in text else text
