"""What one step shows to device-side code: tensors and padded sizes, no host values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes every buffer is allocated for, once."""

    max_rows: int  # rows of the request table, which is also the most requests in one step
    max_num_tokens: int  # most tokens in one step
    max_model_len: int  # most tokens of one request, prompt and generated
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of all buffers
    dtype: torch.dtype = torch.float32  # the model's
    vocab_size: int = 0  # token ids are below it


@dataclass(frozen=True, slots=True, kw_only=True)
class TableView:
    """Device columns of the request table, indexed by row. Read-only for adapters."""

    all_token_ids: Tensor  # [max_rows, max_model_len] int32; prompt, then generated
    prompt_len: Tensor  # [max_rows] int32
    prefill_len: Tensor  # [max_rows] int32: prompt, and what was generated before a preemption
    total_len: Tensor  # [max_rows] int32: known tokens; exact
    num_computed: Tensor  # [max_rows] int32: tokens whose cache entries exist; exact
    active: Tensor  # [max_rows] bool: False once the device has stopped the request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step's batch. `i` is a position in this batch, `row` a stable table index; never mix them.

    Tensors are views of persistent buffers: same addresses every step, valid within the step only.
    Padding (i >= the real number of requests, tokens after the last real one) holds neutral values: row -1,
    query length 0, seq_len 0, input id 0, position 0, slot -1, block 0. An inactive row keeps its place but
    looks like a fresh request in the scratch block: positions from 0, slot -1, block 0.
    """

    num_reqs: int  # padded
    num_tokens: int  # padded
    max_query_len: int  # upper bound
    max_seq_len: int  # upper bound
    num_decodes: int  # the first num_decodes requests have query length 1
    rows: Tensor  # [num_reqs] int32
    query_start_loc: Tensor  # [num_reqs + 1] int32
    seq_lens: Tensor  # [num_reqs] int32, length after this step
    input_ids: Tensor  # [num_tokens] int32
    positions: Tensor  # [num_tokens] int64
    token_to_i: Tensor  # [num_tokens] int32, batch position of each token; -1 for padding
    logits_indices: Tensor  # [num_reqs] int64, token index of each request's last token; 0 for padding
    block_tables: tuple[Tensor, ...]  # per KV group [num_reqs, max_blocks] int32; of states [num_reqs, 1]
    slot_mappings: tuple[Tensor, ...]  # per KV group [num_tokens] int64; all -1 for a group of states
    table: TableView  # columns by row


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMeta:
    """What an attention layer or an adapter's own kernel gets for one KV group in one step.

    Slot and block 0 are scratch: padding points there, and writing there is legal. Tensors keep their addresses
    from step to step.
    """

    num_reqs: int  # padded
    num_tokens: int  # padded
    max_query_len: int  # upper bound
    max_seq_len: int  # upper bound
    num_decodes: int  # the first num_decodes requests have query length 1
    query_start_loc: Tensor  # [num_reqs + 1] int32; padded requests have length 0
    seq_lens: Tensor  # [num_reqs] int32, length after this step
    slot_mapping: Tensor  # [num_tokens] int64 flat slot of each new token; -1 for padding and inactive rows
    block_table: Tensor  # [num_reqs, max_blocks] int32
    block_size: int  # tokens per block of this group
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # from `ModelState.attn_extras`
    state_slots: Tensor | None = None  # groups of states: [num_reqs, 1 + drafts] int32
    read_col: Tensor | None = None  # with drafts: [num_reqs] int32, column with the state after the accepted tokens
    verify: Tensor | None = None  # with drafts: [num_reqs] bool, keep the state after token t in column t

    @property
    def computed(self) -> Tensor:
        """[num_reqs] int32: tokens before this step. Derived inside the step, so a replay recomputes it."""
        return self.seq_lens - (self.query_start_loc[1:] - self.query_start_loc[:-1])


AttnMetadata = Mapping[str, CacheMeta]
"""Per KV group name."""
