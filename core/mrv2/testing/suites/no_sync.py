"""No-sync: nothing on the step path waits for the device, or needs one of its values on the host."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from mrv2.state.view import StepView
from mrv2.testing.bench import Bench, Fed
from mrv2.testing.recorder import HostReadError, RecordedOps
from mrv2.testing.results import ConformanceFailure, Level, check
from mrv2.testing.subject import Case

CAUSES = [
    "int(), float(), bool(), .item(), .tolist() or .cpu() of a tensor, or a branch on one",
    "a mask as an index, nonzero, unique: results whose size only the device knows (use torch.where)",
]


def _steps(bench: Bench, case: Case) -> Iterator[list[tuple[Fed, int]]]:
    """A prompt beside a decode, and decodes."""
    first, second = (Fed(p, case.option(i + 1)) for i, p in enumerate(case.prompts((12, 6), seed=21)))
    bench.add(first, 1)
    yield [(first, 8)]
    bench.add(second, 0)
    yield [(first, 1), (second, 4)]
    yield [(first, 1), (second, 1)]


@check(Level.CPU, runs=True)
def the_device_side_reads_nothing(case: Case) -> None:
    """Inputs, metadata and forward of a step read no tensor's value on the host (P2, P3).

    The message has the line. Where a value is needed, keep it on the device, or take an upper bound from the view.
    """
    bench = Bench(case.loaded, device=case.device, graphable=True)
    for number, step in enumerate(_steps(bench, case), 1):
        view = bench.view(step)
        try:
            with torch.inference_mode():
                RecordedOps().record(partial(_device_side, bench, view))
        except HostReadError as error:
            raise ConformanceFailure(
                f"the operations of step {number} with those that need no answer from the device", str(error), CAUSES
            ) from error
        bench.step(step)


def _device_side(bench: Bench, view: StepView) -> Tensor:
    return bench.forward.logits(bench.forward.hidden(view), view)


@check(Level.GPU, runs=True)
def the_step_never_waits(case: Case) -> None:
    """A whole step, staging included, runs with CUDA's synchronisation made an error (P3).

    Copies to the device come from pinned memory, with `non_blocking=True`.
    """
    warm = Bench(case.loaded, device=case.device)
    for step in _steps(warm, case):
        warm.step(step)
    bench = Bench(case.loaded, device=case.device)
    for number, step in enumerate(_steps(bench, case), 1):
        torch.cuda.synchronize()
        try:
            with _sync_is_an_error(), torch.inference_mode():
                bench.forward.hidden(bench.view(step))
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            frame = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename][-1]
            raise ConformanceFailure(
                f"step {number} with one that never waits for the device",
                f"{frame.filename}:{frame.lineno} in {frame.name}",
                ["a copy from memory that isn't pinned, or without non_blocking=True", *CAUSES],
            ) from error
        bench.step(step)


@contextmanager
def _sync_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
