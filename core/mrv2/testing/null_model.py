"""A model that does nothing: whatever time a step then takes is the runner's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from mrv2.attn.groups import AttentionCache
from mrv2.config import ModelConfig
from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.layers.base import StepContext, WeightMap
from mrv2.loader.tokenizer import Tokenizer
from mrv2.model_state.default import DefaultModelState
from mrv2.runner.graphs import default_plan
from mrv2.runner.runner import Runner

T = TypeVar("T")

VOCAB_SIZE = 8


class NullModel(nn.Module):
    """Hidden states of zeros, and logits that always prefer token 1."""

    weight_map: ClassVar[WeightMap] = WeightMap()
    parts: ClassVar[tuple[type, ...]] = ()
    recurrent: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.eye(VOCAB_SIZE)[1], requires_grad=False)
        self.lm_head = self._head

    def _head(self, hidden: Tensor) -> Tensor:
        return self.row.expand(len(hidden), -1)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """[num_tokens, 1] zeros."""
        return self.row.new_zeros(len(input_ids), 1)


def null_model(*, max_model_len: int, tokenizer: Tokenizer | None = None) -> LoadedModel:
    """`NullModel` with the block tables of one attention layer.

    Args:
        max_model_len: most tokens of one request.
        tokenizer: for text; it needn't have as few tokens as the model.
    """
    config = ModelConfig(
        path=Path("null"),
        architecture="NullModel",
        model_type="null",
        hf_config=SimpleNamespace(),
        raw={},
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        max_model_len=max_model_len,
        eos_token_ids=(),
        dtype=None,
    )
    return LoadedModel(
        name="null",
        module=NullModel(),
        caches={"layer": AttentionCache(1, 1, None)},
        rope_fixed_up_to=None,
        state_class=DefaultModelState,
        config=config,
        tokenizer=tokenizer,
        adapter="null",
        chunked_prefill=True,
        prefix_caching=True,
    )


def null_engine(*, max_model_len: int, **settings: Any) -> EngineParts:
    """An engine around `null_model`.

    Args:
        max_model_len: most tokens of one request.
        settings: fields of `EngineConfig`.
    """
    return assemble(null_model(max_model_len=max_model_len), EngineConfig(device="cpu", **settings))


class NullReplays:
    """A `Recorder` whose graphs do nothing, so that a step costs what the host does for it and no more."""

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """`run` is called once; replays give what it returned."""
        result = run()
        return lambda: result


def null_replays(*, max_model_len: int, **settings: Any) -> EngineParts:
    """An engine that replays decodes as on a GPU, with graphs that do nothing: every request always gains token 1.

    Args:
        max_model_len: most tokens of one request.
        settings: fields of `EngineConfig`.
    """
    parts = null_engine(max_model_len=max_model_len, **settings)
    runner = parts.engine._runner
    assert isinstance(runner, Runner)
    runner.use_graphs(replace(default_plan(parts.limits), num_tokens=()), NullReplays())
    runner._ring.slots.fill_(1)
    return parts
