"""Whether a filled model runs at all: one prompt, alone. Whatever else feeds the model depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrv2.testing.bench import Bench, Fed
from mrv2.testing.results import ConformanceFailure
from mrv2.testing.torch_settings import Settings, torch_settings

if TYPE_CHECKING:
    from mrv2.testing.subject import Case

LENGTH = 23
"""Tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What came of it."""

    error: Exception | None  # why there are no hidden states to go on with; a finding, or what was raised
    before: Settings  # torch's, before forward
    after: Settings  # and after it


def first_run(case: Case) -> FirstRun:
    """Run the model once.

    Raises:
        NotRun: it can't be loaded.
    """
    loaded, error = case.loaded, None
    before = after = _settings()
    try:
        bench, (ids,) = Bench(loaded, device=case.device, poison=False), case.prompts((LENGTH,), seed=4)
        request = Fed(ids, case.options[-1])
        bench.add(request, 0)
        view = bench.view([(request, len(ids))])
        with torch.inference_mode():
            before = _settings()
            try:
                hidden = bench.forward.hidden(view)
            finally:
                after = _settings()
        head: Any = bench.module.lm_head
        weight: Tensor = head.full_weight()
        _look_at(hidden, [view.num_tokens, weight.shape[-1]], weight.dtype)
    except Exception as raised:
        error = raised
    return FirstRun(error=error, before=before, after=after)


def _settings() -> Settings:
    return {**torch_settings(), "seed": torch.initial_seed()}


def _look_at(hidden: Any, shape: list[int], dtype: torch.dtype) -> None:
    """Refuse what are no hidden states of this shape and dtype, [tokens, width], or no numbers."""
    want = f"a tensor {shape} of {dtype}"
    is_shape = isinstance(hidden, Tensor) and list(hidden.shape) == shape
    got = f"a {type(hidden).__name__}"
    if isinstance(hidden, Tensor):
        got = f"a tensor {list(hidden.shape)} of {hidden.dtype}"
    compared = f"what forward returns for {LENGTH} tokens with hidden states"
    if got != want:
        causes = ["forward returns something else than ctx.finish gave it", "a tensor of another dtype was mixed in"]
        if is_shape:
            causes.reverse()
        raise ConformanceFailure(compared, f"{got}, expected {want}", causes)
    odd = (~hidden[:LENGTH].isfinite()).any(1).nonzero()
    if len(odd):
        raise ConformanceFailure(
            compared,
            f"position {int(odd[0, 0])}: not a number, or infinite; so are {len(odd)} of {LENGTH} positions",
            ["a division by zero, or the root or logarithm of a negative number",
             "a buffer that nothing was written to",
             "a weight of the checkpoint that is none: see write_checkpoint"],
        )  # fmt: skip
