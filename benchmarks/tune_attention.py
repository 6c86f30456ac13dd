"""Variants of decode attention, from the projection on, by batch and context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tuning import BF16, Case, Prepared, normal, off

from mrv2.kernels.attend_projected import attend_projected
from mrv2.kernels.decode_splits import SLOTS_PER_PROCESSOR, DecodeWorkspace, Tile, choose_splits, choose_tile

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
TILES = [Tile(16, 2, 4), Tile(64, 4, 3), Tile(32, 2, 4), Tile(16, 1, 4), Tile(16, 2, 6), Tile(32, 4, 3)]
CONTEXTS = {(288, 288): 1024, (640, 640): 1024, (100, 2000): 4096, (4096, 4096): 16384}
"""Lengths of requests, evenly spread from the first to the second, and the bound that a graph is captured with."""

SPLITS: dict[int, list[tuple[int, int]]] = {
    256: [(1, 1024), (4, 512), (8, 256), (16, 128)],
    128: [(1, 1024), (4, 512), (8, 256), (16, 128)],
    64: [(1, 1024), (2, 128), (8, 256), (16, 128)],
    32: [(1, 1024), (2, 128), (3, 64), (8, 256)],
    16: [(5, 64), (4, 128), (3, 128), (8, 64)],
    4: [(16, 64), (8, 128), (8, 64), (4, 128)],
    1: [(32, 32), (16, 64), (8, 128)],
}
MOST_BYTES = 12 << 30


def lengths_of(batch: int, context: tuple[int, int]) -> torch.Tensor:
    """Of each request, [batch] int32, in an order that knows nothing of them."""
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
    return torch.linspace(*context, batch)[order].int()


def make_attention(
    batch: int, context: tuple[int, int], bound: int, workspace: DecodeWorkspace
) -> Callable[[int], Prepared]:
    def make(copies: int) -> Prepared:
        width = -(-context[1] // BLOCK_SIZE)
        num_blocks = copies * batch * width + 1
        cache = torch.empty(num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **BF16).normal_()
        tables = torch.zeros(copies, batch, -(-bound // BLOCK_SIZE), dtype=torch.int32, device=BF16["device"])
        tables[:, :, :width] = 1 + torch.randperm(num_blocks - 1, device=BF16["device"]).int().view(
            copies, batch, width
        )
        lens = lengths_of(batch, context).to(BF16["device"])
        last = lens.long() - 1
        slots = tables[:, torch.arange(batch), last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        qkv = normal(batch, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        out = torch.full((batch, HEADS, HEAD_DIM), float("nan"), **BF16)
        given: dict[str, Any] = {
            "q_weight": normal(HEAD_DIM),
            "k_weight": normal(HEAD_DIM),
            "q_eps": 1e-6,
            "k_eps": 1e-6,
            "cache": cache,
            "scale": HEAD_DIM**-0.5,
            "window": None,
            "soft_cap": None,
            "workspace": workspace,
        }
        rows = {"qkv": qkv, "cos": normal(batch, HEAD_DIM), "sin": normal(batch, HEAD_DIM), "seq_lens": lens}

        def error() -> float:
            some = min(batch, 8)  # the twin takes a row per key
            few = {name: value[:some] for name, value in rows.items()}
            few |= {"block_table": tables[0, :some], "slot_mapping": slots[0, :some]}
            want = torch.empty_like(out[:some])
            attend_projected.twin(**given, **few, max_seq_len=context[1], out=want)
            return off(out[:some], want) if bool(torch.isfinite(out).all()) else float("inf")

        def launch(i: int) -> None:
            attend_projected(**given, **rows, block_table=tables[i], slot_mapping=slots[i], max_seq_len=bound, out=out)

        return Prepared(launch, error)

    return make


def attention_cases() -> Iterator[Case]:
    """The default first, which has to be among those that are timed."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for batch, splits in SPLITS.items():
        for context, bound in CONTEXTS.items():
            num_bytes = int(lengths_of(batch, context).sum()) * 2 * KV_HEADS * HEAD_DIM * 2
            if 2 * num_bytes > MOST_BYTES:
                continue
            group = {"batch": batch, "context": context}
            pairs = batch * KV_HEADS
            default = (
                choose_splits(pairs, bound, processors),
                choose_tile(HEAD_DIM, torch.bfloat16, pairs=pairs, reach=bound, processors=processors),
            )
            variants = [default] + [(split, tile) for split in splits for tile in TILES]
            for split, tile in dict.fromkeys(variants):
                most = split
                if batch <= 16 and (split, tile) != default:  # for the longer bound, and as far as there is room
                    most = min(split[0] * bound // 1024, SLOTS_PER_PROCESSOR * processors // pairs), split[1]
                kind = f"{tile.keys} keys, {tile.num_warps} warps, {tile.num_stages} stages"
                key = f"splits {most[0]}, at least {most[1]}; {kind}" + "; default" * ((split, tile) == default)
                make = make_attention(batch, context, bound, DecodeWorkspace(tile=tile, splits=most))
                yield Case(group, key, num_bytes, make, dependent=batch <= 64, compiled=kind)
