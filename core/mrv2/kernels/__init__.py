"""Triton kernels, each with a torch twin of the same signature; and how to declare one."""

from mrv2.kernels.block_tables import compute_slot_mappings, gather_block_tables
from mrv2.kernels.copy_blocks import copy_blocks
from mrv2.kernels.gumbel import gumbel_noise
from mrv2.kernels.prepare_inputs import prepare_inputs
from mrv2.kernels.query_start_loc import compute_query_start_loc
from mrv2.kernels.registry import Kernel, jit, kernel, tl, triton
from mrv2.kernels.sample_gumbel import sample_gumbel
from mrv2.kernels.staged_writes import apply_staged_writes
from mrv2.kernels.update_after_sample import update_after_sample

__all__ = [
    "Kernel",
    "apply_staged_writes",
    "compute_query_start_loc",
    "compute_slot_mappings",
    "copy_blocks",
    "gather_block_tables",
    "gumbel_noise",
    "jit",
    "kernel",
    "prepare_inputs",
    "sample_gumbel",
    "tl",
    "triton",
    "update_after_sample",
]
