"""Variants of the products of a decode step, beside cuBLAS with what lies beside the product launched by itself."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tuning import BF16, Case, Prepared, Report, graph_time, launches, normal, off

from mrv2.kernels import add_rms_norm, gate_normed, gated_act, project_normed, project_onto
from mrv2.kernels.token_tile import FROM_TOKENS, TokenTile, choose_token_tile, make_arrivals, token_block
from mrv2.kernels.vector_tile import VectorTile, choose_vector_tile

EPS = 1e-6
Tile = VectorTile | TokenTile | None


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    name: str
    hidden: int
    qkv: int
    attended: int
    intermediate: int


QWEN = Shape("Qwen3-0.6B", 1024, 4096, 2048, 3072)
LARGER = Shape("Qwen3-1.7B", 2048, 4096, 2048, 6144)
PRODUCTS = ("qkv", "o", "gate-up", "down")
TOKENS = {QWEN: (32, 128, 64, 16, 8, 4, 1), LARGER: (32,)}
"""In order of worth, should time run out."""


def sizes(shape: Shape, product: str) -> tuple[int, int]:
    """Rows of the weight and elements of a row."""
    return {
        "qkv": (shape.qkv, shape.hidden),
        "o": (shape.hidden, shape.attended),
        "gate-up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }[product]


def arguments(shape: Shape, product: str, tokens: int, tile: Tile) -> tuple[Any, dict[str, Any]]:
    """The kernel, and all that it takes but the weight."""
    rows, size = sizes(shape, product)
    given = {"x": normal(tokens, size), "bias": None, "tile": tile}
    if product in ("o", "down"):
        residual, arrived = normal(tokens, rows), make_arrivals(torch.device(BF16["device"]))
        return project_onto.project_onto, given | {"residual": residual, "arrived": arrived, "out": residual.clone()}
    given |= {"residual": None, "gain": normal(size), "eps": EPS, "summed": None}
    if product == "qkv":
        return project_normed.project_normed, given | {"out": normal(tokens, rows)}
    return gate_normed.gate_normed, given | {"act": "silu", "out": normal(tokens, rows // 2)}


def make_ours(shape: Shape, product: str, tokens: int, tile: Tile) -> Callable[[int], Prepared]:
    def make(copies: int) -> Prepared:
        rows, size = sizes(shape, product)
        weights = normal(copies, rows, size, scale=size**-0.5)
        kernel, given = arguments(shape, product, tokens, tile)
        given["out"].fill_(float("nan"))

        def error() -> float:
            """Of the launch before and of one more, which finds its counters as it should, to the twin in float64."""
            exact = {k: v.double() if isinstance(v, torch.Tensor) and k != "arrived" else v for k, v in given.items()}
            kernel.twin(weight=weights[0].double(), **exact)
            first = off(given["out"], exact["out"])
            given["out"].fill_(float("nan"))
            kernel(weight=weights[0], **given)
            return max(first, off(given["out"], exact["out"]))

        return Prepared(lambda i: kernel(weight=weights[i], **given), error)

    return make


def make_cublas(shape: Shape, product: str, tokens: int) -> Callable[[int], Prepared]:
    """The add of an output projection is left to the norm that follows."""

    def make(copies: int) -> Prepared:
        rows, size = sizes(shape, product)
        weights = normal(copies, rows, size, scale=size**-0.5)
        return Prepared(cublas_launch(weights, product, tokens))

    return make


def cublas_launch(weights: torch.Tensor, product: str, tokens: int) -> Callable[[int], Any]:
    rows, size = weights.shape[1:]
    x, residual, gain = normal(tokens, size), normal(tokens, size), normal(size)
    normed, out = torch.empty_like(x), normal(tokens, rows // 2)

    def launch(i: int) -> None:
        if product in ("o", "down"):
            F.linear(x, weights[i])
            return
        add_rms_norm(x=x, residual=residual, weight=gain, eps=EPS, summed=residual, out=normed)
        projected = F.linear(normed, weights[i])
        if product == "gate-up":
            gated_act(gate_up=projected, act="silu", out=out)

    return launch


def token_tiles(tokens: int, rows: int, size: int, *, splits: bool) -> list[TokenTile]:
    """Around the default one: by rows, steps, shares, stages and warps; no more on their way than fits."""
    block = token_block(tokens)
    found = [choose_token_tile(tokens, rows, size, splits=splits)]
    heights, depths = ((16, 32, 64), (128, 64, 256)) if block <= 32 else ((32, 64, 128), (64, 128))
    for height, depth, share in itertools.product(heights, depths, (1, 2, 3, 4, 6, 8) if splits else (1,)):
        programs = -(-rows // height) * share
        if not (80 if splits else 48) <= programs <= (270 if splits else 400):
            continue
        for warps in (4, 8) if depth == depths[0] else (4,):
            each = 2 * depth * (block + height)
            steps = -(-size // (share * depth))
            stages = max(2, min(steps + 1, 8, (100 << 10) // each))
            tile = TokenTile(height, depth, share, stages, warps)
            if steps >= 2 and stages * each <= 200 << 10 and tile not in found:
                found.append(tile)
    return found


def vector_tiles(size: int, matrices: int) -> list[VectorTile]:
    found = [choose_vector_tile(size, matrices=matrices)]
    row = 1 << (size - 1).bit_length()
    for elements, warps in ((64, 4), (32, 4), (64, 2), (64, 1), (64, 8)):
        rows = 32 * warps * elements // (row * matrices)
        if 1 <= rows <= 32 and (tile := VectorTile(rows, warps)) not in found:
            found.append(tile)
    return found


def name_of(tile: Tile) -> str:
    if isinstance(tile, TokenTile):
        return (
            f"rows {tile.rows}, depth {tile.depth}, splits {tile.splits}, stages {tile.stages}, warps {tile.num_warps}"
        )
    assert tile is not None
    return f"vectors: rows {tile.rows}, warps {tile.num_warps}"


def product_cases() -> Iterator[Case]:
    for shape, token_counts in TOKENS.items():
        for tokens in token_counts:
            for product in PRODUCTS:
                rows, size = sizes(shape, product)
                group = {"shape": shape.name, "product": product, "tokens": tokens}
                num_bytes = 2 * rows * size
                yield Case(group, "cublas", num_bytes, make_cublas(shape, product, tokens))
                tiles: list[Tile] = []
                if tokens <= 4:
                    tiles += vector_tiles(size, 2 if product == "gate-up" else 1)
                if tokens >= 4:
                    tiles += token_tiles(tokens, rows, size, splits=product in ("o", "down"))
                if tokens < 32 or shape is LARGER:
                    tiles = tiles[:6] + tiles[6::2]
                for tile in tiles:
                    make = make_ours(shape, product, tokens, tile)
                    kind = f"{shape.name} {product} {token_block(tokens)} {name_of(tile)}"
                    kind += f" {tokens}" if isinstance(tile, VectorTile) else ""
                    yield Case(group, name_of(tile), num_bytes, make, dependent=True, compiled=kind)


# -- what was found ------------------------------------------------------------------------------------------


def winners(report: dict[str, Any], shape: Shape = QWEN) -> dict[tuple[int, int, int], TokenTile]:
    """Quickest tile by tokens, rows and size."""
    found: dict[tuple[int, int, int], TokenTile] = {}
    for entry in report.get("products", []):
        keys = [key for key in entry["us"] if key.startswith("rows")]
        if entry["shape"] == shape.name and keys and entry["tokens"] >= FROM_TOKENS:
            numbers = [int(part.split()[1]) for part in keys[0].split(", ")]
            found[entry["tokens"], *sizes(shape, entry["product"])] = TokenTile(*numbers)
    return found


@contextmanager
def tuned(found: dict[tuple[int, int, int], TokenTile]) -> Iterator[None]:
    """The kernels take these tiles by themselves, where there is one for as many tokens."""

    def choose(num_tokens: int, num_rows: int, size: int, *, splits: bool = False) -> TokenTile:
        block = token_block(num_tokens)
        known = [key for key in found if key[1:] == (num_rows, size) and token_block(key[0]) == block]
        return found[max(known)] if known else choose_token_tile(num_tokens, num_rows, size, splits=splits)

    with ExitStack() as stack:
        for module in (project_normed, gate_normed, project_onto):
            stack.enter_context(mock.patch.object(module, "choose_token_tile", choose))
        yield


def measure_layers(report: Report, copy: float, shape: Shape = QWEN, layers: int = 28) -> None:
    """The four products of 28 layers one after the other, as a step has them: microseconds per layer."""
    num_bytes = sum(2 * rows * size for rows, size in (sizes(shape, product) for product in PRODUCTS))
    weights = {}
    for product in PRODUCTS:
        rows, size = sizes(shape, product)
        weights[product] = normal(layers, rows, size, scale=size**-0.5)
    for tokens in (8, 16, 32, 64, 128):
        if report.late():
            return
        row: dict[str, Any] = {"tokens": tokens, "floor_us": round(num_bytes / copy * 1e6, 2)}
        plain = [cublas_launch(weights[product], product, tokens) for product in PRODUCTS]
        ours = []
        for product in PRODUCTS:
            kernel, given = arguments(shape, product, tokens, None)
            ours.append(lambda i, k=kernel, w=weights[product], g=given: k(weight=w[i], **g))
        best = winners(report.document)
        for name, chain, early, tiles in (
            ("cublas", plain, False, {}),
            ("default", ours, False, {}),
            ("default dependent", ours, True, {}),
            ("tuned dependent", ours, True, best),
        ):
            try:
                with launches(early), tuned(tiles):

                    def run(chain: list[Any] = chain) -> None:
                        for i in range(layers):
                            for launch in chain:
                                launch(i)

                    run()
                    row[name] = round(graph_time(run) / layers, 2)
            except Exception as error:
                row[name] = f"{type(error).__name__}: {error}"[:160]
        report.note("layers", row)


def best_products(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The quickest of ours beside cuBLAS and what is built in now."""
    rows = []
    for entry in report.get("products", []):
        ours = {key: us for key, us in entry["us"].items() if key != "cublas"}
        if not ours:
            continue
        shape = QWEN if entry["shape"] == QWEN.name else LARGER
        num_rows, size = sizes(shape, entry["product"])
        splits = entry["product"] in ("o", "down")
        default: Tile = choose_token_tile(entry["tokens"], num_rows, size, splits=splits)
        if entry["tokens"] < FROM_TOKENS:
            default = choose_vector_tile(size, matrices=2 if entry["product"] == "gate-up" else 1)
        key = next(iter(ours))
        row = {name: value for name, value in entry.items() if name not in ("us", "failed")}
        row |= {"best": key, "best_us": ours[key], "default_us": ours.get(name_of(default))}
        rows.append(row | {"cublas_us": entry["us"].get("cublas")})
        print(json.dumps(rows[-1]))
    return rows
