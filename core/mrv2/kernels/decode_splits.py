"""How decode attention is cut: splits of a request's keys, tiles, and the memory for what splits leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrv2.kernels.registry import triton

SLOTS_PER_PROCESSOR = 64
"""Partial results there is room for."""

ALIKE = 1024
"""Up to this bound requests are taken to be about as long as one another."""

PROGRAMS_PER_PROCESSOR = 6
"""What pairs are split for: enough loads are on their way then, and combining costs no more than is gained."""


@dataclass(frozen=True, slots=True)
class Partials:
    """What splits leave for the one that combines them. Slot (i * num_kv_heads + kv_head) * num_splits + split."""

    acc: Tensor  # [slots, group, head_dim] float32, not yet divided
    stats: Tensor  # [slots, group, 2] float32: largest score, sum of weights
    arrived: Tensor  # [slots] int32, by i * num_kv_heads + kv_head: splits done; 0 between launches


class DecodeWorkspace:
    """Memory for partial results, at addresses that never change: captured graphs hold on to them.

    Its size doesn't depend on the batch: the more requests, the fewer splits. Launches that share one must
    run one after the other.

    Args:
        processors: how many the work is spread over; None: the device's.
        tile: how one program works; None: as `choose_tile` says.
        splits: as `choose_splits` gives them; None: as it does.
    """

    def __init__(
        self, processors: int | None = None, *, tile: Tile | None = None, splits: tuple[int, int] | None = None
    ) -> None:
        self.tile = tile
        self.splits = splits
        self._processors = processors
        self._partials: dict[tuple[torch.device, int, int], Partials] = {}

    def processors(self, device: torch.device) -> int:
        """How many multiprocessors the work is spread over."""
        if self._processors is None:
            on_cuda = device.type == "cuda"  # else: interpreted
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 1
        return self._processors

    def partials(self, device: torch.device, group: int, head_dim: int) -> Partials:
        """For layers of `group` query heads per key head; allocated when first asked for, outside a graph capture."""
        key = (device, group, head_dim)
        found = self._partials.get(key)
        if found is None:
            # Memory from a graph's own pool would be zeroed at replay only, not for the steps in between.
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, "run the step once before capturing it"
            slots = SLOTS_PER_PROCESSOR * self.processors(device)
            found = self._partials[key] = Partials(
                acc=torch.empty(slots, group, head_dim, dtype=torch.float32, device=device),
                stats=torch.zeros(slots, group, 2, dtype=torch.float32, device=device),
                arrived=torch.zeros(slots, dtype=torch.int32, device=device),
            )
        return found


def choose_splits(num_pairs: int, reach: int, processors: int) -> tuple[int, int]:
    """Programs per pair of request and key head, and tokens that a split is at least given.

    Lengths are known to the device only. Few pairs are split until all processors are busy, the fewer the shorter the
    splits. Beyond `ALIKE` lengths may be far apart, and most of the time would be spent on the last few long requests:
    there splits have a size, and long requests more of them (on an H200, at lengths of 100 to 2,000, 12 % quicker at
    256 requests, 23 % at 64, 27 % at 32, and at most 4 % slower where all have 4,096: `tune_attention-h200.json`).

    Args:
        num_pairs: requests times key heads.
        reach: upper bound of the keys of one query.
        processors: multiprocessors of the device.
    """
    room = SLOTS_PER_PROCESSOR * processors // num_pairs
    most = max(1, round(PROGRAMS_PER_PROCESSOR * processors / num_pairs))
    if reach > ALIKE:
        min_split = max(32, triton.next_power_of_2(ALIKE // 2 // most))
        most = max(most, 16)
    else:
        min_split = 32 if most >= 64 else 64
    return max(1, min(most, room, triton.cdiv(reach, min_split))), min_split


@dataclass(frozen=True, slots=True)
class Tile:
    """How one program works: keys per iteration, and what the compiler is told."""

    keys: int
    num_warps: int
    num_stages: int


def choose_tile(head_dim: int, dtype: torch.dtype, *, pairs: int, reach: int, processors: int) -> Tile:
    """By dtype and head size, and by how many programs there are to a processor.

    Small tiles leave no processor idle at the end, and loads of several programs hide one another's wait. One warp
    does where few programs share a processor, where all of them just fit, and where lengths differ; between and beyond,
    two are quicker (as `benchmarks/tune_decode.py` found on an H200). Arguments as in `choose_splits`.
    """
    wide = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # no matrix units at this precision: spread wide, to stay in registers
        return Tile(keys=32, num_warps=8, num_stages=2)
    if wide <= 128:
        single = reach > ALIKE or pairs <= 2 * processors or 5 * processors < pairs <= 8 * processors
        return Tile(keys=16, num_warps=1 if single else 2, num_stages=4)
    return Tile(keys=32, num_warps=4, num_stages=3)
