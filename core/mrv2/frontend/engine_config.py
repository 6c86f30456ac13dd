"""How to run a model: the settings of an engine, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mrv2.errors import UnsupportedError
from mrv2.layers.base import DTYPES

MAX_DEPTH = 8
"""Most steps in flight: more would only delay the news that a request has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run a model.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto": the checkpoint's on a GPU, float32 on a CPU.
        device: a torch device, or "auto": the first GPU, else the CPU.
        max_model_len: most tokens of one request; None: the model's own context.
        max_num_seqs: most requests running at once.
        max_num_tokens: most tokens computed in one step; long prompts are cut into chunks.
        max_chunk: most prompt tokens of one request in one step; None: no limit of its own.
        block_size: tokens per KV block; None: 16, or more where the model keeps large states (`choose_block_size`).
        kv_memory: bytes of the KV cache; None: a share of the free memory, as far as it can be used.
        num_blocks: blocks of the KV cache, scratch included; overrides `kv_memory`.
        prefix_caching: reuse cached blocks of equal prefixes; None: if the adapter offers it.
        depth: steps in flight; None: 1 on a CPU, 2 on a GPU.
        runner: "async", or "sync": its plain twin, for debugging.
        graphs: replay steps as CUDA graphs; None: on a GPU, unless the model can't be captured, `debug` is on or
            `runner` is "sync". True: refuse where that isn't possible.
        debug: make faults of adapters and kernels show: late streams, poison in what nobody may read, a watch over
            the whole cache, which is 1 GiB at most then unless its size is given. Tokens stay the same; see
            `DebugRunner`. Slow, and off costs nothing. Turns graphs off.
        max_queue: most requests waiting for a row, preempted ones included. More are refused, or fed in as room appears
            (`LLM.generate`). Each costs its prompt's memory, and waits for all before it: the default keeps 64 rows
            busy for a while without hiding for long that they can't keep up. None: no limit.
        seed: of the generator behind unseeded requests; None: from the system.
        weights: "checkpoint", or "random": the model's folder needs a config only. For measurements.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_tokens: int = 2048
    max_chunk: int | None = None
    block_size: int | None = None
    kv_memory: int | None = None
    num_blocks: int | None = None
    prefix_caching: bool | None = None
    depth: int | None = None
    runner: Literal["async", "sync"] = "async"
    graphs: bool | None = None
    debug: bool = False
    max_queue: int | None = 4096
    seed: int | None = None
    weights: Literal["checkpoint", "random"] = "checkpoint"

    def __post_init__(self) -> None:
        def whole(x: object, low: int, high: int = 2**31 - 1) -> bool:
            return isinstance(x, int) and not isinstance(x, bool) and low <= x <= high

        enough = whole(self.max_num_seqs, 1) and whole(self.max_num_tokens, self.max_num_seqs)
        rules: list[tuple[str, bool, str]] = [
            ("dtype", self.dtype in ("auto", *DTYPES), f"auto or one of {', '.join(DTYPES)}"),
            ("max_model_len", self.max_model_len is None or whole(self.max_model_len, 2), "an integer of at least 2"),
            ("max_num_seqs", whole(self.max_num_seqs, 1), "an integer of at least 1"),
            ("max_num_tokens", enough, "an integer of at least max_num_seqs, or decodes would starve"),
            ("max_chunk", self.max_chunk is None or whole(self.max_chunk, 1), "an integer of at least 1"),
            ("block_size", self.block_size is None or whole(self.block_size, 1), "an integer of at least 1"),
            ("kv_memory", self.kv_memory is None or whole(self.kv_memory, 1, 2**63), "a positive number of bytes"),
            ("num_blocks", self.num_blocks is None or whole(self.num_blocks, 2), "at least 2 (one is scratch)"),
            ("depth", self.depth is None or whole(self.depth, 1, MAX_DEPTH), f"from 1 to {MAX_DEPTH}"),
            ("depth", self.runner == "async" or self.depth in (None, 1), "1 with runner='sync'"),
            ("runner", self.runner in ("async", "sync"), "async or sync"),
            ("graphs", self.graphs is None or isinstance(self.graphs, bool), "true, false, or None"),
            ("graphs", not (self.graphs and self.debug), "left out or false with debug=True"),
            ("graphs", not (self.graphs and self.runner == "sync"), "left out or false with runner='sync'"),
            ("weights", self.weights in ("checkpoint", "random"), "checkpoint or random"),
            ("debug", isinstance(self.debug, bool), "true or false"),
            ("runner", not self.debug or self.runner == "async", "async with debug=True"),
            (
                "prefix_caching",
                self.prefix_caching is None or isinstance(self.prefix_caching, bool),
                "true, false, or None",
            ),
            ("seed", self.seed is None or whole(self.seed, -(2**63), 2**63 - 1), "a 64-bit integer, or None"),
            ("max_queue", self.max_queue is None or whole(self.max_queue, 1), "an integer of at least 1, or None"),
        ]
        for name, ok, want in rules:
            if not ok:
                raise UnsupportedError(
                    f"{name}={getattr(self, name)!r}: must be {want}", where="engine settings", fix=f"change {name}"
                )
