"""The Taichi program that tests and random programs run in: started afresh, and ended with all that belongs to it."""

import gc
import os
import tempfile
import weakref

import pytest
import taichi as ti
from field_pool import pool

from taichi_ext import backend
from taichi_ext.backend import lifetime

arch = ti.cpu
settings: dict = {}  # of ti.init, for all programs
started: dict = {}  # the options of the current program, and a weak reference to it
MOST_TREES = 150  # of fields, of 512 that a program can hold: with more of them, another program is started
cache = tempfile.TemporaryDirectory(prefix="taichi-ext-tests-")
for variable in ("TI_OFFLINE_CACHE_FILE_PATH", "QD_OFFLINE_CACHE_FILE_PATH"):
    os.environ[variable] = cache.name  # of programs that tests start without initialise, too


def initialise(**options) -> None:
    """Start Taichi afresh: two threads, nothing cached on disk, errors only.

    Taichi locks the folder of its cache even if it does not use it. If the folder is missing, or a dead process left its
    lock there, Taichi waits 0.2 s at the first launch and 0.4 s at the end of each program. So all programs of a process and of
    those that it starts have a folder of their own.
    """
    end_program()
    started.update(options=options)
    ti.init(arch=arch, offline_cache=False, log_level=ti.ERROR, **{"cpu_max_num_threads": 2, **settings, **options})
    if arch != ti.cpu and ti.cfg.arch != arch:
        pytest.exit(f"Taichi finds no {arch} device here", returncode=2)
    started.update(program=weakref.ref(backend.program()))


def share_program(**options) -> None:
    """Start Taichi afresh, unless a program with these options runs: a start takes 0.25 s of CPU time."""
    program = backend.program()
    is_ours = program is not None and started.get("program", lambda: None)() is program
    if is_ours and started["options"] == options and program.get_snode_tree_size() < MOST_TREES:
        if not lifetime._layout().destroyed:  # of these, ti.deactivate_all_snodes reads freed memory
            return
    del program
    initialise(**options)


def end_program() -> None:
    """End the Taichi program, and before it all that belongs to it.

    Taichi 1.7.4 frees by address: a ti.ndarray that is collected after the next ti.init may take an array of the next
    program with it, and a program that is still referred to then takes fields of the next one when it goes.
    """
    pool.forget()
    program = backend.program()
    if program is None:
        ti.reset()
        return
    gc.collect()
    ended = weakref.ref(program)
    del program
    ti.reset()
    assert ti.__name__ == "quadrants" or ended() is None, (
        "something refers to the Taichi program, which has to go with ti.reset()"
    )
