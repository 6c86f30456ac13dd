"""How the kernels of a decode step are best cut, on this GPU: products of a few tokens, attention, and both in a step.

Every case is captured in a CUDA graph that runs it over enough copies of its weights, or of its cache, that none is
left in the L2 cache from the time before; microseconds per launch, the gap to the next one included. Everything is
compiled beforehand, by as many processes as there are cores. Prints one JSON document, at the end the best of each case
and the constants that it speaks for.

    python benchmarks/tune_decode.py [--sections products attention step] [--json FILE] [--seconds 110]

What to change for which outcome (`best` names the winners):

- products: `ELEMENTS` and `WARPS` in core/mrv2/kernels/vector_tile.py, if another (rows, warps) wins at one token;
  `FEW_TOKENS` in core/mrv2/layers/fused.py, the most tokens at which the sum over a layer (`layer`) is below cuBLAS's.
- attention: `choose_tile` and `choose_splits` in core/mrv2/kernels/decode_attention.py.
- step: `DEPENDENT_TOKENS` in core/mrv2/kernels/dependent.py, where `dependent` is quicker, `same_tokens` true.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import copy_bandwidth, environment

from mrv2.kernels import add_rms_norm, dependent, gated_act
from mrv2.kernels.decode_attention import DecodeWorkspace, Tile, choose_splits, choose_tile, decode_attention
from mrv2.kernels.gate_normed import gate_normed
from mrv2.kernels.project_normed import project_normed
from mrv2.kernels.project_onto import project_onto
from mrv2.kernels.vector_tile import VectorTile, choose_vector_tile
from mrv2.layers import fused

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
COLD = 160 * 2**20
"""Bytes that a graph runs through before it meets the same ones again: three times the L2 cache."""

MOST_LAUNCHES = 64
EPS = 1e-6

Launch = Callable[[int], Any]


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    name: str
    hidden: int
    qkv: int
    attended: int
    intermediate: int


QWEN = Shape("Qwen3-0.6B", 1024, 4096, 2048, 3072)
LLAMA = Shape("Llama-8B", 4096, 6144, 4096, 14336)


@dataclass
class Case:
    """One thing to time: variant `key` of `group`. `make` gives what to launch with a copy's number."""

    group: dict[str, Any]
    key: str
    num_bytes: int
    make: Callable[[int], Launch]

    def copies(self) -> int:
        return max(2, min(MOST_LAUNCHES, -(-COLD // self.num_bytes)))


def time_case(case: Case, replays: int = 12) -> float:
    """Microseconds per launch. Median over replays."""
    copies = case.copies()
    launch = case.make(copies)
    launch(0)
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 24 // copies)
    with torch.cuda.graph(graph):
        for i in range(copies * rounds):
            launch(i % copies)
    graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for first, last in marks:
        first.record()
        graph.replay()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in marks) * 1e3 / (copies * rounds)


# -- products ----------------------------------------------------------------------------------------------


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, **BF16) * scale


def weights(copies: int, rows: int, size: int) -> torch.Tensor:
    return torch.randn(copies, rows, size, **BF16) * size**-0.5


def make_normed(tokens: int, rows: int, size: int, tile: VectorTile | None, *, ours: bool) -> Callable[[int], Launch]:
    """Norm and projection: in one, or by `add_rms_norm` and cuBLAS."""

    def make(copies: int) -> Launch:
        w, x, residual, gain = weights(copies, rows, size), normal(tokens, size), normal(tokens, size), normal(size)
        normed, out = torch.empty_like(x), normal(tokens, rows)

        def fused_launch(i: int) -> None:
            project_normed(
                x=x, residual=None, gain=gain, eps=EPS, weight=w[i], bias=None, summed=None, out=out, tile=tile
            )

        def plain_launch(i: int) -> None:
            add_rms_norm(x=x, residual=residual, weight=gain, eps=EPS, summed=residual, out=normed)
            F.linear(normed, w[i])

        return fused_launch if ours else plain_launch

    return make


def make_gate(tokens: int, rows: int, size: int, tile: VectorTile | None, *, ours: bool) -> Callable[[int], Launch]:
    """Norm, gate and up, activation; `rows` of each."""

    def make(copies: int) -> Launch:
        w, x, residual, gain = weights(copies, 2 * rows, size), normal(tokens, size), normal(tokens, size), normal(size)
        normed, out = torch.empty_like(x), normal(tokens, rows)

        def fused_launch(i: int) -> None:
            gate_normed(
                x=x,
                residual=None,
                gain=gain,
                eps=EPS,
                weight=w[i],
                bias=None,
                act="silu",
                summed=None,
                out=out,
                tile=tile,
            )

        def plain_launch(i: int) -> None:
            add_rms_norm(x=x, residual=residual, weight=gain, eps=EPS, summed=residual, out=normed)
            gated_act(gate_up=F.linear(normed, w[i]), act="silu", out=out)

        return fused_launch if ours else plain_launch

    return make


def make_onto(tokens: int, rows: int, size: int, tile: VectorTile | None, *, ours: bool) -> Callable[[int], Launch]:
    """Projection and residual add; cuBLAS leaves the add to the norm that follows."""

    def make(copies: int) -> Launch:
        w, x, residual = weights(copies, rows, size), normal(tokens, size), normal(tokens, rows)
        out = torch.empty_like(residual)

        def fused_launch(i: int) -> None:
            project_onto(x=x, weight=w[i], bias=None, residual=residual, out=out, tile=tile)

        return fused_launch if ours else lambda i: F.linear(x, w[i])

    return make


def tiles(size: int, matrices: int, *, many: bool) -> list[VectorTile]:
    """Around the default one: elements per thread, and warps."""
    row = 1 << (size - 1).bit_length()
    pairs = [(64, 4), (32, 4), (64, 8)]
    if many:
        pairs += [(64, 2), (64, 1), (128, 4), (32, 8), (128, 2), (64, 16)]
    found = [choose_vector_tile(size, matrices=matrices)]
    for elements, warps in pairs:
        rows = 32 * warps * elements // (row * matrices)
        if 1 <= rows <= 32 and (tile := VectorTile(rows, warps)) not in found:
            found.append(tile)
    return found


def product_cases() -> Iterator[Case]:
    for shape, token_counts in ((QWEN, (1, 2, 4, 8)), (LLAMA, (1, 4))):
        products = {
            "qkv": (make_normed, shape.qkv, shape.hidden, 1),
            "o": (make_onto, shape.hidden, shape.attended, 1),
            "gate-up": (make_gate, shape.intermediate, shape.hidden, 2),
            "down": (make_onto, shape.hidden, shape.intermediate, 1),
        }
        for tokens in token_counts:
            for name, (make, rows, size, matrices) in products.items():
                group = {"shape": shape.name, "product": name, "tokens": tokens}
                num_bytes = 2 * rows * size * matrices
                yield Case(group, "cublas", num_bytes, make(tokens, rows, size, None, ours=False))
                for tile in tiles(size, matrices, many=tokens == 1 and shape is QWEN):
                    key = f"rows {tile.rows}, warps {tile.num_warps}"
                    yield Case(group, key, num_bytes, make(tokens, rows, size, tile, ours=True))


# -- attention ---------------------------------------------------------------------------------------------

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, CONTEXT, BOUND = 16, 8, 128, 16, 288, 1024
TILES = [Tile(64, 4, 3), Tile(32, 4, 3), Tile(32, 4, 4), Tile(64, 4, 2), Tile(64, 4, 4), Tile(128, 4, 2)]
TILES += [Tile(128, 8, 2), Tile(32, 2, 4), Tile(16, 2, 4), Tile(64, 8, 3)]
SPLITS = {
    1: [(16, 64), (8, 128), (4, 256), (2, 512), (1, 1024), (32, 32)],
    32: [(1, 1024), (2, 128), (2, 256), (3, 64), (3, 128), (5, 64)],
    128: [(1, 1024), (2, 128), (3, 64)],
    256: [(1, 1024), (2, 128)],
}


def make_attention(batch: int, context: int, workspace: DecodeWorkspace) -> Callable[[int], Launch]:
    def make(copies: int) -> Launch:
        width = -(-context // BLOCK_SIZE)
        num_blocks = copies * batch * width + 1
        cache = torch.empty(num_blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, **BF16).normal_()
        tables = torch.zeros(copies, batch, -(-BOUND // BLOCK_SIZE), dtype=torch.int32, device="cuda")
        tables[:, :, :width] = 1 + torch.randperm(num_blocks - 1, device="cuda").int().view(copies, batch, width)
        q = normal(batch, HEADS, HEAD_DIM)
        out, lens = torch.empty_like(q), torch.full((batch,), context, dtype=torch.int32, device="cuda")

        def launch(i: int) -> None:
            decode_attention(
                q=q,
                cache=cache,
                block_table=tables[i],
                seq_lens=lens,
                num_decodes=batch,
                max_seq_len=BOUND,
                scale=HEAD_DIM**-0.5,
                window=None,
                soft_cap=None,
                workspace=workspace,
                out=out,
            )

        return launch

    return make


def attention_cases() -> Iterator[Case]:
    for batch, splits in SPLITS.items():
        num_bytes = batch * CONTEXT * 2 * KV_HEADS * HEAD_DIM * 2
        group = {"batch": batch, "context": CONTEXT}
        for split in splits:
            for tile in TILES:
                if batch >= 128 and split != splits[0] and tile.keys == 128:
                    continue
                key = f"splits {split[0]}, at least {split[1]}; {tile.keys} keys, {tile.num_warps} warps, "
                key += f"{tile.num_stages} stages"
                workspace = DecodeWorkspace(tile=tile, splits=split)
                yield Case(group, key, num_bytes, make_attention(batch, CONTEXT, workspace))


# -- all -----------------------------------------------------------------------------------------------------


def floor_us(case: Case, copy: float) -> float:
    """What reading its bytes takes at the bandwidth of a copy."""
    return case.num_bytes / copy * 1e6


def compile_all(sections: list[str]) -> None:
    """In processes of their own, which leave the results in Triton's cache."""
    jobs = min(14, max(1, (os.cpu_count() or 2) - 1))
    kernels = [name for name in sections if name != "step"]
    steps = [["--warm", str(batch), way] for batch in SMALL for way in WAYS] if "step" in sections else []
    shares = max(2, jobs - len(steps)) if kernels else 0
    commands = [["--sections", *kernels, "--compile", str(i), str(shares)] for i in range(shares)] + steps
    running = [subprocess.Popen([sys.executable, __file__, *more], stdout=subprocess.DEVNULL) for more in commands]
    for process in running:
        process.wait()


def cases_of(sections: list[str]) -> list[Case]:
    found = list(product_cases()) if "products" in sections else []
    return found + (list(attention_cases()) if "attention" in sections else [])


def compile_share(cases: list[Case], part: int, parts: int) -> None:
    """Launch each case once with one copy. Variants that can't be launched are left to say so when they are timed."""
    for case in cases[part::parts]:
        try:
            case.make(1)(0)
        except Exception as error:
            print(f"{case.group} {case.key}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
    torch.cuda.synchronize()


def measure(cases: list[Case], copy: float, deadline: float) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for case in cases:
        entry = groups.setdefault(
            json.dumps(case.group), case.group | {"floor_us": round(floor_us(case, copy), 2), "us": {}}
        )
        if time.monotonic() > deadline:
            entry["us"][case.key] = "not reached"
            continue
        try:
            entry["us"][case.key] = round(time_case(case), 2)
        except Exception as error:
            entry["us"][case.key] = f"{type(error).__name__}: {error}"[:120]
    for entry in groups.values():
        failed = {key: us for key, us in entry["us"].items() if isinstance(us, str)}
        timed = {key: us for key, us in entry["us"].items() if key not in failed}
        entry["us"] = dict(sorted(timed.items(), key=lambda item: item[1])) | failed
    return list(groups.values())


def best(entry: dict[str, Any]) -> dict[str, Any]:
    """The quickest of ours, beside cuBLAS and what is built in now."""
    timed = {key: us for key, us in entry["us"].items() if isinstance(us, float)}
    ours = {key: us for key, us in timed.items() if key != "cublas"}
    row = {name: value for name, value in entry.items() if name != "us"}
    if not ours:
        return row
    key = min(ours, key=ours.__getitem__)
    row |= {"best": key, "best_us": ours[key], "default_us": ours.get(default_key(entry))}
    return row | ({"cublas_us": timed["cublas"]} if "cublas" in timed else {})


def default_key(entry: dict[str, Any]) -> str:
    """The variant that the library takes by itself."""
    if "product" in entry:
        shape = QWEN if entry["shape"] == QWEN.name else LLAMA
        sizes = {"qkv": shape.hidden, "o": shape.attended, "gate-up": shape.hidden, "down": shape.intermediate}
        tile = choose_vector_tile(sizes[entry["product"]], matrices=2 if entry["product"] == "gate-up" else 1)
        return f"rows {tile.rows}, warps {tile.num_warps}"
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    splits, least = choose_splits(entry["batch"] * KV_HEADS, BOUND, processors)
    t = choose_tile(HEAD_DIM, torch.bfloat16)
    return f"splits {splits}, at least {least}; {t.keys} keys, {t.num_warps} warps, {t.num_stages} stages"


def layer_sums(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The four products of a layer together, by tokens: where `FEW_TOKENS` should end."""
    sums: dict[tuple[str, int], dict[str, Any]] = {}
    for row in map(best, entries):
        if "best_us" not in row or "cublas_us" not in row:
            continue
        total = sums.setdefault((row["shape"], row["tokens"]), {"floor_us": 0.0, "best_us": 0.0, "default_us": 0.0})
        for name in ("floor_us", "best_us", "default_us", "cublas_us"):
            total[name] = round(total.get(name, 0.0) + (row[name] or 0.0), 2)
    return [{"shape": shape, "tokens": tokens} | total for (shape, tokens), total in sums.items()]


# -- steps -------------------------------------------------------------------------------------------------


PROMPT = 256
SMALL, LARGE = (1, 4, 8), (32, 256)
WAYS = {"cublas": (0, False), "cublas dependent": (0, True), "few": (8, False), "few dependent": (8, True)}
"""Most tokens for the kernels of a few, and whether launches are dependent."""


@contextmanager
def constants(few_tokens: int, dependent_launch: bool) -> Iterator[None]:
    before = fused.FEW_TOKENS, dependent.DEPENDENT_TOKENS
    fused.FEW_TOKENS, dependent.DEPENDENT_TOKENS = few_tokens, 1 << 30 if dependent_launch else 0
    try:
        yield
    finally:
        fused.FEW_TOKENS, dependent.DEPENDENT_TOKENS = before


def random_model(**changes: Any) -> Any:
    from gpu_step import SHAPE, make_model

    with tempfile.TemporaryDirectory() as folder:
        return make_model(SHAPE | changes, torch.device("cuda"), Path(folder))


def generate(model: Any, batch: int, way: tuple[int, bool], new: int = 40) -> tuple[list[list[int]], float]:
    """Greedy tokens of `batch` requests, and the median microseconds of a replay."""
    with constants(*way):
        return _generate(model, batch, new)


def _generate(model: Any, batch: int, new: int) -> tuple[list[list[int]], float]:
    from step import Replays

    from mrv2 import SamplingParams
    from mrv2.frontend.build import EngineConfig, assemble

    # All prompts in one step, so that all requests decode together.
    config = EngineConfig(
        device="cuda",
        max_num_seqs=batch,
        max_num_tokens=max(2048, PROMPT * batch),
        max_model_len=1024,
        num_blocks=128 + 24 * batch,
        graphs=True,
    )
    parts, rng = assemble(model, config), random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    requests = []
    for i in range(batch):
        ids = [rng.randrange(model.config.vocab_size) for _ in range(PROMPT)]
        requests.append(parts.intake.request(str(i), ids, params))
        parts.engine.add([requests[-1]])
    with Replays() as replays:
        while parts.engine.has_work:
            parts.engine.step()
    replays.marks = replays.marks[-new // 2 :]
    return [request.tokens_np[PROMPT:].tolist() for request in requests], replays.report()["device_us"]


def measure_steps(deadline: float) -> list[dict[str, Any]]:
    """Replays of the whole step: cuBLAS or ours, launches early or not."""
    model, rows = random_model(), []
    for batch in (*SMALL, *LARGE):
        row: dict[str, Any] = {"batch": batch}
        tokens: dict[str, list[list[int]]] = {}
        for name, way in WAYS.items():
            if batch in LARGE and name.startswith("few"):
                continue
            if time.monotonic() > deadline:
                row[name] = "not reached"
                continue
            try:
                tokens[name], row[name] = generate(model, batch, way)
            except Exception as error:
                row[name] = f"{type(error).__name__}: {error}"[:300]
            gc.collect()
        for name in ("cublas", "few"):
            if name in tokens and f"{name} dependent" in tokens:
                row[f"{name}: same_tokens"] = tokens[name] == tokens[f"{name} dependent"]
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=["products", "attention", "step"])
    parser.add_argument("--seconds", type=float, default=110, help="stop beginning new cases after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warm", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    start = time.monotonic()
    if args.compile:
        with torch.inference_mode():
            compile_share(cases_of(args.sections), *args.compile)
        return
    if args.warm:
        generate(random_model(num_hidden_layers=1), int(args.warm[0]), WAYS[args.warm[1]], new=4)
        return
    report: dict[str, Any] = {"benchmark": "tune_decode", **environment(torch.device("cuda", 0))}
    compile_all(args.sections)
    report["compile_s"] = round(time.monotonic() - start, 1)
    copy = copy_bandwidth()
    report["copy_bytes_per_s"] = round(copy)
    torch.cuda.empty_cache()

    def note(name: str, value: Any) -> None:
        report[name] = value
        report["seconds"] = round(time.monotonic() - start, 1)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    deadline = start + args.seconds
    with torch.inference_mode():
        for section in ("attention", "products"):
            if section in args.sections:
                note(section, measure(cases_of([section]), copy, deadline))
    if "step" in args.sections:
        note("step", measure_steps(deadline))
    measured = report.get("products", []) + report.get("attention", [])
    note("best", [best(entry) for entry in measured])
    note("layer", layer_sums(report.get("products", [])))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
