"""Run a model built from the native layers on ragged batches, without scheduler or runner.

The cache is hostile: blocks are handed out in random order, and everything nobody has written holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mrv2.attn.backend import AttentionBackend, select_backend
from mrv2.attn.groups import BoundCache, KVGroup, make_groups
from mrv2.layers.context import NativeContext
from mrv2.layers.native import NativeLayers, check_names, check_recurrent
from mrv2.layers.one_token import one_token_for
from mrv2.loader.weights import load_weights
from mrv2.state.view import CacheMeta


def build_native(
    model_class: Any, config: Any, tensors: Iterable[tuple[str, Tensor]]
) -> tuple[nn.Module, NativeLayers]:
    """A model of the native host, names checked, weights loaded, ready to run.

    Args:
        model_class: what the adapter's `mrv2_model` returns.
        config: the model's config.
        tensors: (checkpoint name, tensor) pairs.
    """
    layers = NativeLayers()
    model: nn.Module = model_class(layers, config)
    check_names(model, layers)
    check_recurrent(model, layers)
    load_weights(model, tensors, model_class.weight_map.for_config(config))
    layers.finalize(model)
    return model, layers


@dataclass(slots=True)
class _Request:
    index: int
    token_ids: Sequence[int]
    computed: int = 0
    num_steps: int = 0
    hidden: list[Tensor] = field(default_factory=list)


class RaggedBatch:
    """Several prompts in one batch, over as many steps as their chunks need.

    Args:
        model: built from `layers`, weights loaded.
        layers: the layer set it was built from.
        block_size: tokens per cache block.
        backend: attention; None: the one for the parameters' device.
        seed: of the order in which blocks are handed out.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: NativeLayers,
        *,
        block_size: int = 4,
        backend: AttentionBackend | None = None,
        seed: int = 0,
    ) -> None:
        parameter = next(model.parameters())
        self.model = model
        self.layers = layers
        self.device, self.dtype = parameter.device, parameter.dtype
        self.groups = make_groups(layers.caches, block_size)
        self.backend = select_backend(self.device) if backend is None else backend
        self.one_token = one_token_for(self.backend)
        self.generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def logits(
        self, prompts: Sequence[Sequence[int]], *, chunks: Sequence[int] | None = None, padding: int = 0
    ) -> list[Tensor]:
        """Logits of every position of every prompt, [len(prompt), vocab] each.

        Args:
            prompts: token ids.
            chunks: tokens per step; request r starts at entry r and goes round. None: whole prompts.
            padding: extra requests and tokens in every step, as a graph's fixed sizes would add.
        """
        requests = [_Request(i, prompt) for i, prompt in enumerate(prompts)]
        tables, caches = self._allocate(prompts)
        while waiting := [r for r in requests if r.computed < len(r.token_ids)]:
            step = [(r, self._take(r, chunks)) for r in waiting]
            step.sort(key=lambda item: item[1] != 1)  # single tokens first, as the runner orders them
            self._step(step, tables, caches, padding)
        head: nn.Module = self.model.lm_head  # type: ignore[assignment]
        return [head(torch.cat(r.hidden)) for r in requests]

    def _take(self, request: _Request, chunks: Sequence[int] | None) -> int:
        left = len(request.token_ids) - request.computed
        return left if chunks is None else min(left, chunks[(request.index + request.num_steps) % len(chunks)])

    def _allocate(self, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Tensor], dict[str, BoundCache]]:
        """Block table per group [num_prompts, max_blocks], and cache per layer."""
        block_size = self.groups[0].block_size
        max_blocks = max(-(-len(p) // block_size) for p in prompts)
        per_group = len(prompts) * max_blocks
        order = torch.randperm(per_group * len(self.groups), generator=self.generator) + 1  # 0 is scratch
        tables = {
            group.name: order[g * per_group : (g + 1) * per_group].view(-1, max_blocks).int().to(self.device)
            for g, group in enumerate(self.groups)
        }
        caches: dict[str, BoundCache] = {}
        for name, spec in self.layers.caches.items():
            shape = (len(order) + 1, spec.bytes_per_block(block_size, self.dtype))
            pages = torch.full(shape, 0xFF, dtype=torch.uint8, device=self.device)  # NaN in every dtype
            caches[name] = spec.views(pages, block_size, self.dtype)
        return tables, caches

    def _step(
        self, step: list[tuple[_Request, int]], tables: dict[str, Tensor], caches: dict[str, BoundCache], padding: int
    ) -> None:
        lens = [n for _, n in step]
        ids = [r.token_ids[r.computed + j] for r, n in step for j in range(n)] + [0] * padding
        positions = [r.computed + j for r, n in step for j in range(n)] + [0] * padding
        ctx = NativeContext(
            attn={group.name: self._meta(step, tables[group.name], group, padding) for group in self.groups},
            caches=caches,
            group_of={name: group.name for group in self.groups for name in group.layers},
            backend=self.backend,
            one_token=self.one_token,
            prompt_lens=lambda: self._int32([len(r.token_ids) for r, _ in step] + [0] * padding),
        )
        hidden = self.model(self._int32(ids), torch.tensor(positions, device=self.device), ctx)
        for (request, n), rows in zip(step, hidden[: sum(lens)].split(lens), strict=True):
            request.hidden.append(rows)
            request.computed += n
            request.num_steps += 1

    def _meta(self, step: list[tuple[_Request, int]], table: Tensor, group: KVGroup, padding: int) -> CacheMeta:
        size = group.block_size
        if group.states:
            table = table[:, :1]
            slots = [-1] * sum(n for _, n in step)
        else:
            places = [(r.index, p) for r, n in step for p in range(r.computed, r.computed + n)]
            slots = [int(table[i, p // size]) * size + p % size for i, p in places]
        ends = torch.tensor([0] + [n for _, n in step] + [0] * padding).cumsum(0)
        rows = table[[r.index for r, _ in step]]
        rows = torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))
        seq_lens = [r.computed + n for r, n in step]
        return CacheMeta(
            num_reqs=len(step) + padding,
            num_tokens=len(slots) + padding,
            max_query_len=max(n for _, n in step),
            max_seq_len=max(seq_lens),
            num_decodes=sum(n == 1 for _, n in step),
            query_start_loc=ends.int().to(self.device),
            seq_lens=self._int32(seq_lens + [0] * padding),
            slot_mapping=torch.tensor(slots + [-1] * padding, device=self.device),
            block_table=rows,
            block_size=size,
            state_slots=rows if group.states else None,
        )

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
