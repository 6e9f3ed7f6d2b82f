"""Starting processes from whatever program uses this package."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def leaving_main_alone() -> Iterator[None]:
    """Start processes that do not run the caller's script again.

    multiprocessing imports the main module in every process that it starts, in case the function
    to be called lives there. Ours live in modules of their own; a script that trains without
    `if __name__ == "__main__"` would otherwise start ranks in every rank.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
