"""The oracle: generation without a cache, a batch, or anything else that could be wrong in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LogitsOf = Callable[[Sequence[int]], Tensor]
"""Token ids to the logits of the next one, [vocab]."""


class NaiveGreedy:
    """Greedy generation by recomputing the whole sequence for every token.

    Args:
        logits_of: the model, as a function of all token ids so far.
    """

    def __init__(self, logits_of: LogitsOf) -> None:
        self._next = lru_cache(maxsize=None)(lambda ids: int(logits_of(ids).argmax()))

    @classmethod
    def from_transformers(cls, folder: Path) -> NaiveGreedy:
        """A checkpoint run by transformers in float32, its cache off."""
        return cls(transformers_logits(folder))

    def __call__(self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
        """Generated tokens, up to and with the first of `stop_ids`."""
        ids = tuple(prompt)
        out: list[int] = []
        while len(out) < max_tokens and not (out and out[-1] in stop_ids):
            out.append(self._next(ids))
            ids += (out[-1],)
        return out


def transformers_logits(folder: Path) -> LogitsOf:
    """The reference's next-token logits, float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits_of(ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, -1]
        return logits

    return logits_of
