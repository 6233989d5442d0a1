"""Processes for runs that have nothing to do with each other."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor


def new_pool(processes: int | None = None) -> ProcessPoolExecutor:
    """Processes that begin from nothing: forking one that has threads can hang. None: one a core.

    They end with the process that made them, even when that one is killed (SIGKILL).
    """
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=spawn, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A worker waits at a pipe of which it holds both ends: that nobody is left to send it work, it
    would never notice."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="minifer-parent", daemon=True).start()
