"""Kernels compiled before they are needed, several at a time.

A model's first steps launch some fifty kernels, each of which Triton compiles for a third of a second where it meets it
first. Compiling is the work of libraries that let go of Python's lock: so threads do it at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from mrv2.kernels.registry import compile_mode, compiles_only, triton

MOST_THREADS = 16


@contextmanager
def compiling_in_parallel() -> Iterator[None]:
    """Within, threads compile this package's kernels, and a launch waits for its own only. The end waits for all.

    What can't be compiled is an error of the launch that needs it. Kernels of others are compiled as ever.
    """
    if not hasattr(triton, "AsyncCompileMode") or compile_mode.get() is not None:  # Triton has it from 3.5 on
        yield
        return
    pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))
    mode = triton.AsyncCompileMode(pool, ignore_errors=True)
    before = compile_mode.set(mode)
    try:
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    finally:
        compile_mode.reset(before)
        for kernel in mode.future_kernels.values():
            if kernel.future is not None:
                kernel.result(ignore_errors=True)
        pool.shutdown()


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
