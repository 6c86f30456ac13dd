"""Whole steps on a GPU: cuBLAS or kernels of our own, launched dependently or not, with the tiles that were found."""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from random_model import SHAPE, make_model
from tune_products import tuned, winners
from tuning import Report

from mrv2 import SamplingParams
from mrv2.bench.steps import Replays
from mrv2.frontend.build import assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.kernels import dependent
from mrv2.layers import fused
from mrv2.layers.context import NativeContext

PROMPT = 256
BATCHES = (32, 128, 1, 256, 8, 16, 64)
ALL = 1 << 30
WAYS = {
    "before": (0, 0, 0, False),
    "cublas": (0, 0, 0, True),
    "ours": (128, 0, 0, True),
    "ours dependent, early": (128, ALL, ALL, True),
    "ours dependent": (128, ALL, 0, True),
    "ours dependent, separate": (128, ALL, 0, False),
}
"""Most tokens for products by kernels of our own, for dependent launches, and for such that begin early; whether
attention takes projections."""


@contextmanager
def constants(ours: int, dependent_launch: int, early: int, projected: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(fused, FEW_TOKENS=min(ours, 4), SOME_TOKENS=ours))
        stack.enter_context(mock.patch.multiple(dependent, DEPENDENT_TOKENS=dependent_launch, EARLY_TOKENS=early))
        if not projected:
            stack.enter_context(mock.patch.object(NativeContext, "attend_projected", return_value=None))
        yield


def random_model(**changes: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return make_model(SHAPE | changes, torch.device("cuda"), Path(folder))


def generate(model: Any, batch: int, way: tuple[int, int, int, bool], new: int = 48) -> tuple[list[list[int]], float]:
    """Greedy tokens of `batch` requests, and the median microseconds of a replay at about 288 tokens of context."""
    with constants(*way):
        return _generate(model, batch, new)


def _generate(model: Any, batch: int, new: int) -> tuple[list[list[int]], float]:
    # All prompts in one step, so that all requests decode together.
    config = EngineConfig(
        device="cuda",
        max_num_seqs=batch,
        max_num_tokens=max(2048, PROMPT * batch),
        max_model_len=1024,
        num_blocks=128 + 24 * batch,
        graphs=True,
    )
    parts, rng = assemble(model, config), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    requests = []
    for i in range(batch):
        ids = [rng.randrange(model.config.vocab_size) for _ in range(PROMPT)]
        requests.append(parts.intake.request(str(i), ids, params))
        parts.engine.add([requests[-1]])
    with Replays() as replays:
        while parts.engine.has_work:
            parts.engine.step()
    replays.marks = replays.marks[-new // 2 :]
    return [request.tokens_np[PROMPT:].tolist() for request in requests], replays.report()["device_us"]


def measure_steps(report: Report) -> None:
    """Replays of the whole step, by batch and way."""
    model, best = random_model(), winners(report.document)
    for batch in BATCHES:
        row: dict[str, Any] = {"batch": batch}
        tokens: dict[str, list[list[int]]] = {}
        ways = {name: (way, False) for name, way in WAYS.items()}
        if best:
            ways["ours dependent, tuned"] = WAYS["ours dependent"], True
        for name, (way, with_tiles) in ways.items():
            if batch > 128 and name.startswith("ours"):
                continue
            if report.late():
                row[name] = "not reached"
                continue
            try:
                with tuned(best if with_tiles else {}):
                    tokens[name], row[name] = generate(model, batch, way)
            except Exception as error:
                row[name] = f"{type(error).__name__}: {error}"[:300]
            gc.collect()
            torch.cuda.empty_cache()  # while a graph is captured, nothing is given back
        if "ours dependent" in tokens and "ours" in tokens:
            row["same_tokens"] = tokens["ours"] == tokens["ours dependent"]
        report.note("step", row)
