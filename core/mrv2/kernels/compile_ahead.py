"""Kernels compiled before they are needed, several at a time.

A model's first steps launch some fifty kernels, each of which Triton compiles for a third of a second where it meets it
first. Compiling is the work of libraries that let go of Python's lock: so threads do it at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mrv2.kernels.registry import compiles_only, triton

MOST_THREADS = 16


@contextmanager
def compiling_in_parallel() -> Iterator[None]:
    """Within, threads compile, and a launch waits for its own kernel only. The end waits for all of them.

    What can't be compiled is an error of the launch that needs it.
    """
    if triton is None or not hasattr(triton, "AsyncCompileMode"):  # there from Triton 3.5 on
        yield
        return
    with (
        ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool,
        triton.AsyncCompileMode(pool, ignore_errors=True),
    ):
        yield


@contextmanager
def only_compiling() -> Iterator[None]:
    """Within, kernels that would be launched are only compiled: their outputs hold whatever was there before.

    So nothing but shapes may follow from them: an index computed by a kernel would be anything.
    """
    before = compiles_only.set(True)
    try:
        yield
    finally:
        compiles_only.reset(before)
