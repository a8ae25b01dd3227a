"""The release of MAX that this code was written against, and a check that it is the installed one.

The architecture replaces parts of MAX's own gpt-oss. Another release may have other parts under the same names, so this
module refuses it.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

MAX = "26.7.0"


class UnknownMaxError(ImportError):
    """The installed MAX is not the one that this code was written against."""


def require_version() -> None:
    """Raise UnknownMaxError unless the pinned MAX is installed."""
    installed = version("max")
    if installed != MAX:
        raise UnknownMaxError(
            f"max {installed} is installed · spark_mxfp4.max was written against {MAX} and replaces parts of it · "
            f"install max=={MAX}"
        )


def require_signature(owner: object, name: str, *parameters: str) -> None:
    """Raise UnknownMaxError unless `owner`, a class or module, has a function `name` with exactly these parameters."""
    function = getattr(owner, name, None)
    names = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if names != parameters:
        raise UnknownMaxError(
            f"{getattr(owner, '__name__', owner)}.{name} takes ({', '.join(names)}) · "
            f"spark_mxfp4.max expects ({', '.join(parameters)}) · install max=={MAX} anew"
        )
