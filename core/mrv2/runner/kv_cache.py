"""The rows' block tables on the host: growth, prefix hits, windows, release. Columnar by row."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mrv2.attn.groups import KVGroup
from mrv2.errors import RequestError
from mrv2.runner.block_pool import BlockPool
from mrv2.runner.state_slots import StateSlots
from mrv2.sample.params import SamplingParams
from mrv2.state.plan import BlockWrites

Rows = NDArray[np.int32]

PLENTY = 4
"""Free blocks are plenty if there are so many times as many as would be taken in advance."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a new row starts with: per group, one id per block, 0 where none is needed: out of the
    window, and in a group of states all but the last.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]


def hash_root(params: SamplingParams, *, rope_len: int | None = None) -> bytes:
    """Start of a request's hash chain: whatever besides token ids may change cache contents.

    An adapter's per-request options can reach any layer, so requests with other options share nothing.

    Args:
        params: of the request.
        rope_len: the prompt's length, where the rotation of its keys depends on it; None: it doesn't.

    Raises:
        RequestError: an option is no plain data, so that two requests could not be compared.
    """
    if not params.extra_args and rope_len is None:
        return b""
    try:
        text = json.dumps([dict(params.extra_args), rope_len], sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"extra_args can't be told apart from others: {error}",
            where="SamplingParams.extra_args",
            fix="use plain JSON values with text keys",
        ) from error
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens_np: NDArray[np.int32], block_size: int) -> None:
    """Append the chain hashes (128 bits) of all full blocks of `tokens_np` that `hashes` lacks."""
    parent, nbytes = hashes[-1] if hashes else root, block_size * tokens_np.itemsize
    new = tokens_np[len(hashes) * block_size : len(tokens_np) // block_size * block_size].tobytes()
    for start in range(0, len(new), nbytes):
        parent = hashlib.blake2b(parent + new[start : start + nbytes], digest_size=16).digest()
        hashes.append(parent)


class KVCacheManager:
    """Block tables per KV group, kept in step: column c of a row holds tokens c * block_size … in every paged group.

    Groups of states have one slot per row instead; they come last.
    """

    def __init__(
        self, pool: BlockPool, groups: Sequence[KVGroup], *, max_rows: int, max_model_len: int, prefix_caching: bool
    ) -> None:
        self.pool = pool
        self.groups = tuple(groups)
        self.block_size = groups[0].block_size if groups else 16
        self.prefix_caching = prefix_caching
        self.num_paged = sum(not group.states for group in self.groups)
        self.states = StateSlots(pool, self.groups[self.num_paged :], max_rows=max_rows)
        max_blocks = -(-max_model_len // self.block_size)
        self.tables_np = [np.zeros((max_rows, max_blocks), np.int32) for _ in range(self.num_paged)]
        self.num_cols_np = np.zeros(max_rows, np.int32)
        self._first_col_np = np.zeros((len(self.groups), max_rows), np.int32)  # first column not yet given back
        self._hashed_np = np.zeros(max_rows, np.int32)  # columns already in the prefix cache
        # Rows, start columns and column counts [3, n] appended since the last `take_writes`; in all paged groups.
        self._grown: list[NDArray[np.int32]] = []
        self.no_writes = self._writes()

    # -- sizes -------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens that one request alone can hold at most."""
        # With a hit, the checkpoint is held beside the row's own slot until the copy has been planned.
        left = self.pool.num_usable - len(self.states) * (1 + self.keeps_states)
        if self.num_paged:
            return max(left, 0) // self.num_paged * self.block_size
        return 2**31 - 1 if left >= 0 else 0

    @property
    def keeps_states(self) -> bool:
        """Whether states are kept at block edges, so that prefixes can be shared."""
        return self.prefix_caching and len(self.states) > 0

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all paged groups, that `num_tokens` tokens of one request need."""
        return -(-num_tokens // self.block_size) * self.num_paged

    def missing_np(self, rows_np: NDArray[np.int32], lens_np: NDArray[np.int32]) -> NDArray[np.int32]:
        """Columns each row lacks to hold `lens_np` tokens, [num_rows]."""
        needed_np = (lens_np + self.block_size - 1) // self.block_size
        missing_np: NDArray[np.int32] = np.maximum(needed_np - self.num_cols_np[rows_np], 0)
        return missing_np

    def missing_soon_np(self, rows_np: Rows, lens_np: Rows, limits_np: Rows) -> Rows:
        """Columns each row lacks, and where blocks are plenty, those for a block of tokens more, up to its limit.

        Rows then grow together, and for a while no step has to look whether one of them must.
        """
        soon_np = self.missing_np(rows_np, np.minimum(lens_np + self.block_size, limits_np))
        plenty = PLENTY * int(soon_np.sum()) * self.num_paged <= self.pool.num_free
        return soon_np if plenty else self.missing_np(rows_np, lens_np)

    # -- growth ------------------------------------------------------------------------------------------

    def grow(self, rows_np: NDArray[np.int32], missing_np: NDArray[np.int32]) -> None:
        """Append `missing_np` columns to each row. The caller has checked that the blocks are free."""
        need = missing_np > 0
        rows_np, missing_np = rows_np[need], missing_np[need]
        if not len(rows_np):
            return
        total = int(missing_np.sum())
        starts_np = self.num_cols_np[rows_np]
        cu_np = np.concatenate(([0], np.cumsum(missing_np))).astype(np.int32)
        owner_np = np.repeat(np.arange(len(rows_np)), missing_np)
        cols_np = starts_np[owner_np] + np.arange(total, dtype=np.int32) - cu_np[owner_np]
        for table_np in self.tables_np:
            table_np[rows_np[owner_np], cols_np] = self.pool.allocate(total)
        self._grown.append(np.stack((rows_np, starts_np, missing_np)))
        self.num_cols_np[rows_np] += missing_np

    def grow_row(self, row: int, num_tokens: int) -> None:
        """Append the columns that one row lacks to hold `num_tokens`: `grow` for prompts, which come one by one."""
        start = int(self.num_cols_np[row])
        missing = -(-num_tokens // self.block_size) - start
        if missing <= 0:
            return
        for table_np in self.tables_np:
            table_np[row, start : start + missing] = self.pool.allocate(missing)
        self._grown.append(np.array((row, start, missing), np.int32)[:, None])
        self.num_cols_np[row] += missing

    def take_writes(self) -> tuple[BlockWrites, ...]:
        """What was appended since the last call, one entry per group."""
        return self._writes() if self._grown or len(self.states) else self.no_writes

    def _writes(self) -> tuple[BlockWrites, ...]:
        rows_np, starts_np, lens_np = np.concatenate([np.empty((3, 0), np.int32), *self._grown], axis=1)
        self._grown.clear()
        cu_np = np.concatenate(([0], np.cumsum(lens_np))).astype(np.int32)
        owner_np = np.repeat(np.arange(len(rows_np)), lens_np)
        cols_np = starts_np[owner_np] + np.arange(cu_np[-1], dtype=np.int32) - cu_np[owner_np]
        at_np = rows_np[owner_np], cols_np
        writes = (
            BlockWrites(rows=rows_np, starts=starts_np, cu_lens=cu_np, block_ids=t[at_np]) for t in self.tables_np
        )
        return (*writes, *self.states.take_writes())

    # -- prefix cache ------------------------------------------------------------------------------------

    def find_prefix(self, hashes: Sequence[bytes], max_blocks: int) -> PrefixHit:
        """Longest prefix of at most `max_blocks` blocks that every group can serve from the cache."""
        if not self.prefix_caching or not self.groups:
            return PrefixHit(0, tuple(() for _ in self.groups))
        n = min(max_blocks, len(hashes))
        settled = False
        while not settled:
            settled = True
            for g, group in enumerate(self.groups):
                m = self._longest_in_group(g, group, hashes[:n])
                settled, n = settled and m == n, m
        return PrefixHit(n * self.block_size, tuple(self._hit_blocks(g, hashes[:n]) for g in range(len(self.groups))))

    def _longest_in_group(self, g: int, group: KVGroup, hashes: Sequence[bytes]) -> int:
        window = group.window
        if group.states:  # one state stands for all before it
            return next((n for n in range(len(hashes), 0, -1) if self.pool.find((g, hashes[n - 1])) is not None), 0)
        if window is None:
            for n, digest in enumerate(hashes):
                if self.pool.find((g, digest)) is None:
                    return n
            return len(hashes)
        # After a hit of n blocks, the next token looks back window - 1 tokens: those blocks must be there.
        run, reach = 0, -(-(window - 1) // self.block_size)
        best_end = 0
        for n, digest in enumerate(hashes):
            run = run + 1 if self.pool.find((g, digest)) is not None else 0
            if run >= min(reach, n + 1):
                best_end = n + 1
        return best_end

    def _first_needed(self, window: int | None, num_tokens: int) -> int:
        """First column that a token at position `num_tokens` or later can still look at."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def _hit_blocks(self, g: int, hashes: Sequence[bytes]) -> tuple[int, ...]:
        first = self._first_needed(self.groups[g].window, len(hashes) * self.block_size)
        if self.groups[g].states:
            first = len(hashes) - 1
        found = [self.pool.find((g, digest)) if c >= first else 0 for c, digest in enumerate(hashes)]
        return tuple(0 if block is None else block for block in found)

    def open_row(self, row: int, hit: PrefixHit) -> None:
        """Start `row` with the blocks of a prefix hit."""
        n = hit.num_tokens // self.block_size
        for g, blocks in enumerate(hit.blocks[: self.num_paged]):
            self.tables_np[g][row] = 0
            self.tables_np[g][row, :n] = blocks
            self.pool.share(block for block in blocks if block)
            self._first_col_np[g, row] = self._first_needed(self.groups[g].window, hit.num_tokens)
        self.states.open(row, [blocks[-1] for blocks in hit.blocks[self.num_paged :] if blocks])
        self.num_cols_np[row] = n
        self._hashed_np[row] = n
        if n:
            self._grown.append(np.array((row, 0, n), np.int32)[:, None])

    def commit(self, row: int, hashes: Sequence[bytes], num_computed: int) -> None:
        """Index the row's full blocks whose tokens the host has confirmed as computed."""
        done, n = int(self._hashed_np[row]), min(num_computed // self.block_size, len(hashes))
        if not self.prefix_caching:
            return
        self.states.commit(row, hashes, n)
        if n <= done:
            return
        for g, table_np in enumerate(self.tables_np):
            for block, digest in zip(table_np[row, done:n].tolist(), hashes[done:n], strict=True):
                if block:
                    self.pool.cache(block, (g, digest))
        self._hashed_np[row] = n

    def commit_last(self, row: int, hashes: Sequence[bytes], num_computed: int) -> None:
        """For a row with no step to come and none whose outcome is unknown: its state too may serve as a prefix."""
        n, rest = divmod(num_computed, self.block_size)
        if self.keeps_states and not rest and 0 < n <= len(hashes):
            self.states.commit_slot(row, hashes[n - 1])

    # -- release -----------------------------------------------------------------------------------------

    def trim_windows(self, rows_np: NDArray[np.int32], computed_np: NDArray[np.int32]) -> None:
        """Give back blocks that no later token of these rows looks at. `computed_np`: confirmed lengths."""
        for g, group in enumerate(self.groups):
            if group.window is None:
                continue
            first_np = np.maximum(computed_np - group.window + 1, 0) // self.block_size
            behind_np = first_np > self._first_col_np[g, rows_np]
            for row, first in zip(rows_np[behind_np], first_np[behind_np], strict=True):
                self._drop(g, int(row), int(self._first_col_np[g, row]), int(first))
                self._first_col_np[g, row] = first

    def release_row(self, row: int) -> None:
        """Give back all blocks of `row`, its tail first in line for eviction."""
        for g in range(self.num_paged):
            self._drop(g, row, 0, int(self.num_cols_np[row]))
            self._first_col_np[g, row] = 0
        self.num_cols_np[row] = 0
        self._hashed_np[row] = 0
        self.states.release(row)

    def _drop(self, g: int, row: int, start: int, stop: int) -> None:
        cols = self.tables_np[g][row, start:stop]
        self.pool.release(block for block in cols[::-1].tolist() if block)
        cols[:] = 0
