"""Triton kernels, each with a torch twin of the same signature; and how to declare one."""

from mrv2.kernels.add_rms_norm import add_rms_norm
from mrv2.kernels.copy_blocks import copy_blocks
from mrv2.kernels.gated_act import gated_act
from mrv2.kernels.gumbel import gumbel_noise
from mrv2.kernels.prepare_inputs import prepare_inputs
from mrv2.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from mrv2.kernels.registry import Kernel, jit, kernel, on_host, tl, triton
from mrv2.kernels.report_sampled import report_sampled
from mrv2.kernels.sample_gumbel import sample_gumbel
from mrv2.kernels.sample_ranked import sample_ranked
from mrv2.kernels.staged_writes import apply_staged_writes
from mrv2.kernels.update_after_sample import update_after_sample

__all__ = [
    "Kernel",
    "add_rms_norm",
    "apply_staged_writes",
    "copy_blocks",
    "gated_act",
    "gumbel_noise",
    "jit",
    "kernel",
    "on_host",
    "prepare_inputs",
    "qk_norm_rope_cache",
    "report_sampled",
    "sample_gumbel",
    "sample_ranked",
    "tl",
    "triton",
    "update_after_sample",
]
