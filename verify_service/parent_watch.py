"""This file is the end of processes that this service starts: none outlives the service, however that one ended."""

from __future__ import annotations

import os
import threading
from multiprocessing import connection, parent_process

_EXIT_CODE = 1


def end_with_parent() -> None:
    """Have this process, which `multiprocessing` has started, end at once when the one that started it is gone."""
    parent = parent_process()
    assert parent is not None, "this process was started by another one"

    def await_end() -> None:
        connection.wait([parent.sentinel])
        os._exit(_EXIT_CODE)

    threading.Thread(target=await_end, name="parent-watch", daemon=True).start()
