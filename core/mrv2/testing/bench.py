"""A model with its state in the native host's own buffers, driven by hand: no scheduler, no sampling, any batch.

What is fed is known beforehand, so a step may put any requests on any rows in any order, in chunks of any size. The
cache is hostile: blocks are handed out in random order, and everything nobody has written holds NaN.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mrv2.api import RequestData
from mrv2.attn.groups import choose_block_size, make_groups
from mrv2.attn.kv_memory import allocate_pages, bind_caches, page_sizes
from mrv2.attn.triton import TritonAttention
from mrv2.frontend.build import LoadedModel
from mrv2.runner.forward import ForwardPass
from mrv2.sample.params import MAX_STOP_TOKEN_IDS, SamplingParams
from mrv2.state.block_tables import BlockTables
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.plan import BlockWrites, StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits, StepView

ROWS, TOKENS, CONTEXT = 8, 96, 64
BLOCK = 4


@dataclass(slots=True, eq=False)
class Fed:
    """A request whose tokens are all known."""

    ids: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0
    computed: int = 0
    hidden: list[Tensor] = field(default_factory=list)

    def data(self, prompt_len: int | None = None) -> RequestData:
        """As `add_request` gets it; a shorter prompt makes the rest look generated before a preemption."""
        ids_np = np.array(self.ids, np.int32)
        return RequestData(
            req_id=f"fed-{id(self)}",
            prompt_token_ids=ids_np[:prompt_len],
            prefill_token_ids=ids_np,
            num_computed_tokens=self.computed,
            sampling=SamplingParams(temperature=0, extra_args=self.options),
            seed=1,
            len_limit=CONTEXT,
            stop_token_ids=(),
        )


class Bench:
    """Runs `loaded` on batches of `Fed`.

    Args:
        loaded: the model.
        device: that it was loaded to.
        graphable: run only what could be captured: attention kernels (their twins on a CPU), no shortcuts.
        poison: whether what nobody has written holds NaN, or zeros.
        seed: of the order of blocks.
    """

    def __init__(
        self, loaded: LoadedModel, *, device: str, graphable: bool = False, poison: bool = True, seed: int = 0
    ) -> None:
        module: Any = loaded.module
        dtype = next(module.parameters()).dtype
        self.limits = Limits(
            max_rows=ROWS,
            max_num_tokens=TOKENS,
            max_model_len=CONTEXT,
            device=torch.device(device),
            dtype=dtype,
            vocab_size=loaded.config.vocab_size,
        )
        size = BLOCK if choose_block_size(loaded.caches, dtype, step=BLOCK) == BLOCK else 2 * BLOCK
        self.groups = make_groups(loaded.caches, size)
        per_group = ROWS * -(-CONTEXT // size)
        pages = allocate_pages(
            page_sizes(self.groups, loaded.caches, dtype),
            num_blocks=1 + per_group * len(self.groups),
            device=self.limits.device,
        )
        self._unwritten = 0xFF if poison else 0  # NaN in every dtype
        for page in pages:
            page.fill_(self._unwritten)
        self.state = loaded.state_class(module, self.limits, self.groups)
        caches = bind_caches(self.groups, loaded.caches, pages, dtype)
        self.forward = ForwardPass(module, self.state, self.groups, caches=caches, pages=pages)
        if graphable and device == "cpu":
            self.forward._backend, self.forward._one_token = TritonAttention(), None
        self.module: nn.Module = module
        self.pages = pages
        self._table = RequestStates(self.limits, max_stop_ids=MAX_STOP_TOKEN_IDS)
        self._tables = BlockTables(self.limits, self.groups)
        self._buffers = InputBuffers(self.limits, self.groups)
        self._free = list(range(1, 1 + per_group * len(self.groups)))
        self._random = random.Random(seed)
        self._random.shuffle(self._free)

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, request: Fed, row: int, *, prompt_len: int | None = None) -> None:
        """Give it a row and blocks for all of its tokens; nothing is flushed."""
        request.row = row
        data = request.data(prompt_len)
        self._table.add_request(row, data)
        self.state.add_request(row, data)
        writes = []
        for group in self.groups:
            count = 1 if group.states else -(-len(request.ids) // group.block_size)
            blocks, self._free = self._free[:count], self._free[count:]
            for page in self.pages:
                page[blocks] = self._unwritten
            writes.append(_writes(row, blocks))
        self._tables.stage(tuple(writes))

    def remove(self, request: Fed) -> None:
        """Free its row. Its blocks stay lost, and their contents."""
        req_id = request.data().req_id
        self._table.remove_request(request.row, req_id)
        self.state.remove_request(request.row, req_id)

    # -- steps -----------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Bring what is staged to the device."""
        self._table.flush()
        self._tables.flush()
        self.state.apply_staged_writes()

    def view(self, step: Sequence[tuple[Fed, int]], *, padding: tuple[int, int] = (0, 0)) -> StepView:
        """The view of a step of (request, tokens), single tokens first; what is staged is flushed.

        Args:
            step: requests and how many tokens of each.
            padding: requests and tokens beyond them, as far as the limits allow.
        """
        step = sorted(step, key=lambda item: item[1] != 1)
        takes = [take for _, take in step]
        plan = StepPlan(
            step_id=1,
            removed=(),
            added=(),
            rows_np=np.array([request.row for request, _ in step], np.int32),
            query_lens_np=np.array(takes, np.int32),
            block_writes=tuple(_writes(0, []) for _ in self.groups),
            num_decodes=takes.count(1),
            num_tokens=sum(takes),
            max_query_len=max(takes),
            max_seq_len=max(request.computed + take for request, take in step),
        )
        self.state.stage_step(plan)
        self.flush()
        return self._buffers.prepare(
            plan,
            self._table,
            self._tables,
            num_reqs=min(len(step) + padding[0], ROWS),
            num_tokens=min(sum(takes) + padding[1], TOKENS),
        )

    @torch.inference_mode()
    def step(self, step: Sequence[tuple[Fed, int]], *, padding: tuple[int, int] = (0, 0)) -> Tensor:
        """Run one step, keep each request's hidden states, and move on; returns all hidden states."""
        step = sorted(step, key=lambda item: item[1] != 1)
        hidden = self.forward.hidden(self.view(step, padding=padding))
        start = 0
        for request, take in step:
            request.hidden.append(hidden[start : start + take].clone())
            request.computed += take
            self._table.table.num_computed[request.row] += take
            start += take
        return hidden

    @torch.inference_mode()
    def run(
        self, requests: Sequence[Fed], *, chunks: Sequence[int] = (), padding: tuple[int, int] = (0, 0)
    ) -> list[Tensor]:
        """Feed all requests, which have been added, to their ends; log-probabilities [len, vocab] float32 of each.

        Args:
            requests: on their rows.
            chunks: tokens per step; request r starts at entry r and goes round. Empty: whole.
            padding: of every step.
        """
        count = 0
        while waiting := [r for r in requests if r.computed < len(r.ids)]:
            step: list[tuple[Fed, int]] = []
            for k, request in enumerate(waiting):
                left = len(request.ids) - request.computed
                take = min(left, chunks[(k + count) % len(chunks)]) if chunks else left
                if sum(n for _, n in step) + take <= TOKENS:
                    step.append((request, take))
            self.step(step, padding=padding)
            count += 1
        return [self.logprobs(torch.cat(r.hidden)) for r in requests]

    @torch.inference_mode()
    def logprobs(self, hidden: Tensor) -> Tensor:
        """[n, vocab] float32 on the CPU."""
        return self.logits(hidden).float().cpu().log_softmax(-1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab], as the head gives them."""
        head: Any = self.module.lm_head
        logits: Tensor = head(hidden)
        return logits


def _writes(row: int, blocks: Sequence[int]) -> BlockWrites:
    some = [row] if blocks else []
    return BlockWrites(
        rows=np.array(some, np.int32),
        starts=np.zeros(len(some), np.int32),
        cu_lens=np.array([0, len(blocks)] if blocks else [0], np.int32),
        block_ids=np.array(blocks, np.int32),
    )


def run_alone(
    loaded: LoadedModel, ids: Sequence[int], options: Mapping[str, Any], *, device: str, poison: bool = True
) -> Tensor:
    """Log-probabilities [len(ids), vocab] of one request in one step, alone in a new host: what every other way to
    run it has to equal.
    """
    bench, request = Bench(loaded, device=device, poison=poison), Fed(ids, options)
    bench.add(request, 0)
    return bench.run([request])[0]


def logits_alone(loaded: LoadedModel, ids: Sequence[int], *, device: str) -> Tensor:
    """Logits [len(ids), vocab] of the same, on the device."""
    bench, request = Bench(loaded, device=device), Fed(ids)
    bench.add(request, 0)
    return bench.logits(bench.step([(request, len(ids))]))
