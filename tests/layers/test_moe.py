"""The mixture of experts: the fused layer against its composition and against naive code, names, padding, loading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mrv2.errors import LayerArgumentError, WeightsError
from mrv2.layers import LayerSet, StepContext, Stream, WeightMap
from mrv2.layers.native import NativeLayers
from mrv2.loader.weights import collect_slots, load_weights
from mrv2.testing.ragged import RaggedBatch, build_native

HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 24, 2, 8, 20, 31
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 0, 7, 7, 7, 2, 11, 20, 4, 4, 9, 17]]
CONFIG = {"num_experts": 5, "top_k": 2, "renormalize": True, "act": "silu"}


class OpenMoE(nn.Module):
    """What `moe` is, from the small layers."""

    def __init__(self, L: LayerSet, *, num_experts: int, top_k: int, renormalize: bool, act: str) -> None:
        super().__init__()
        self.norm = L.norm("norm", HIDDEN, eps=1e-5)
        self.gate = L.router("gate", HIDDEN, num_experts=num_experts, top_k=top_k, renormalize=renormalize)
        self.experts = L.experts("experts", HIDDEN, INTERMEDIATE, num_experts=num_experts, top_k=top_k, act=act)

    def forward(self, h: Stream, ctx: StepContext) -> Stream:
        x, residual = ctx.prenorm(self.norm, h)
        return Stream(self.experts(x, *self.gate(x, ctx)), residual)


class NaiveMoE(nn.Module):
    """The same with a module for each expert, and a product for each expert and token, wanted or not."""

    def __init__(self, L: LayerSet, *, num_experts: int, top_k: int, renormalize: bool, act: str) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.act = nn.functional.silu if act == "silu" else nn.functional.gelu
        self.norm = L.norm("norm", HIDDEN, eps=1e-5)
        self.gate = L.down("gate", HIDDEN, num_experts)
        self.experts = L.stack("experts", num_experts, lambda L, i: self.expert(L))

    @staticmethod
    def expert(L: LayerSet) -> nn.Module:
        sizes = {"gate_proj": INTERMEDIATE, "up_proj": INTERMEDIATE}
        packed, down = L.packed("gate_up_proj", HIDDEN, sizes), L.down("down_proj", INTERMEDIATE, HIDDEN)
        return nn.ModuleDict({"gate_up_proj": packed, "down_proj": down})

    def forward(self, h: Stream, ctx: StepContext) -> Stream:
        x, residual = ctx.prenorm(self.norm, h)
        probabilities = self.gate(x).softmax(-1)
        weights = torch.zeros_like(probabilities)
        for t, row in enumerate(probabilities):
            best = sorted(range(len(row)), key=lambda e: -row[e])[: self.top_k]
            weights[t, best] = row[best] / row[best].sum() if self.renormalize else row[best]
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            gate, up = expert["gate_up_proj"].parts(x)
            out += weights[:, e, None] * expert["down_proj"](self.act(gate) * up)
        return Stream(out, residual)


class Block(nn.Module):
    def __init__(self, L: LayerSet, c: dict[str, Any]) -> None:
        super().__init__()
        given = dict(c)
        way = given.pop("way", "fused")
        sizes = {"num_heads": HEADS, "num_kv_heads": HEADS, "head_dim": HEAD_DIM}
        self.self_attn = L.self_attention(
            "self_attn", HIDDEN, **sizes, rope=ROPE, max_position=64, norm_eps=1e-5, window=None
        )
        if way == "fused":
            self.mlp = L.moe("mlp", HIDDEN, INTERMEDIATE, norm_eps=1e-5, **given)
        else:
            self.mlp = {"open": OpenMoE, "naive": NaiveMoE}[way](L.scope("mlp"), **given)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        return self.mlp(self.self_attn(h, positions, ctx), ctx)


class Model(nn.Module):
    weight_map = WeightMap()
    parts = ()
    recurrent = False

    def __init__(self, L: LayerSet, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed = L.embedding("embed", VOCAB, HIDDEN)
        self.layers = L.stack("layers", 2, lambda L, i: Block(L, CONFIG | config))
        self.norm = L.final_norm("norm", HIDDEN, eps=1e-5)
        self.lm_head = L.lm_head("lm_head", VOCAB, HIDDEN)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        return ctx.finish(self.norm, ctx.run(self.layers, ctx.embed(self.embed, input_ids), positions))


def random_weights(config: dict[str, Any] | None = None, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    slots = collect_slots(Model(NativeLayers(), config or {}))
    return {name: 0.4 * torch.randn(s.slot.shape, generator=g) for name, s in slots.items()}


VARIANTS = {
    "usual": {},
    "as-softmax-gives": {"renormalize": False, "act": "gelu"},
    "one": {"num_experts": 1, "top_k": 1, "renormalize": False},
    "all": {"top_k": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", ["open", "naive"])
def test_the_fused_layer_equals_its_composition(variant: str, way: str) -> None:
    config = VARIANTS[variant]
    weights = random_weights(config)
    fused, other = (
        RaggedBatch(*build_native(Model, config | {"way": w}, weights.items())).logits(PROMPTS, chunks=(4, 1))
        for w in ("fused", way)
    )
    for a, b in zip(fused, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_parameter_and_checkpoint_names() -> None:
    fused, opened, naive = (Model(NativeLayers(), {"way": way}) for way in ("fused", "open", "naive"))
    assert dict(fused.named_parameters()).keys() == dict(opened.named_parameters()).keys()
    assert collect_slots(fused).keys() == collect_slots(opened).keys() == collect_slots(naive).keys()
    names = {f"layers.1.mlp.experts.4.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert names | {"layers.1.mlp.gate.weight"} <= collect_slots(fused).keys()
    assert fused.layers[0].mlp.experts.w13.shape == (5, 2 * INTERMEDIATE, HIDDEN)
    assert fused.layers[0].mlp.experts.w2.shape == (5, HIDDEN, INTERMEDIATE)


def test_padding_changes_nothing_and_goes_to_no_expert() -> None:
    model, layers = build_native(Model, {}, random_weights().items())
    batch = RaggedBatch(model, layers)
    for a, b in zip(batch.logits(PROMPTS), batch.logits(PROMPTS, padding=3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    moe = model.layers[0].mlp
    x = torch.randn(6, HIDDEN)
    x[4:] = float("nan")
    weights, experts = moe.gate(x, SimpleNamespace(num_real=torch.tensor([4], dtype=torch.int32)))
    assert (experts[4:] == -1).all()
    assert (experts[:4] >= 0).all()
    out = moe.experts(x, weights, experts)
    assert torch.equal(out[4:], torch.zeros(2, HIDDEN))
    assert out[:4].isfinite().all()


def test_interpreted_kernels_equal_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU")
    moe = build_native(Model, {}, random_weights().items())[0].layers[0].mlp
    ctx = SimpleNamespace(num_real=torch.tensor([7], dtype=torch.int32))
    h = Stream(torch.randn(9, HIDDEN), torch.randn(9, HIDDEN))
    want = moe(h, ctx)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    got = moe(h, ctx)
    torch.testing.assert_close(got.x, want.x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.residual, want.residual)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_equals_the_cpu() -> None:
    weights = random_weights()
    want = RaggedBatch(*build_native(Model, {}, weights.items())).logits(PROMPTS, chunks=(4, 1))
    with torch.device("cuda"):
        model, layers = build_native(Model, {}, weights.items())
    got = RaggedBatch(model, layers).logits(PROMPTS, chunks=(4, 1), padding=2)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def test_low_precision_follows_the_reference_in_its_own_rounding() -> None:
    """In bf16 on the CPU, against float64 from the same rounded weights."""
    weights = {n: t.bfloat16() for n, t in random_weights().items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = build_native(Model, {}, weights.items())[0].layers[0].mlp
    finally:
        torch.set_default_dtype(before)
    exact = build_native(Model, {}, weights.items())[0].layers[0].mlp
    x = torch.randn(40, HIDDEN).bfloat16()
    ctx = SimpleNamespace(num_real=torch.tensor([40], dtype=torch.int32))
    routed = moe.gate(x, ctx)
    got, want = moe.experts(x, *routed), exact.experts(x.float(), routed[0].float(), routed[1])
    assert got.dtype == routed[0].dtype == torch.bfloat16
    assert float((got.float() - want).norm() / want.norm()) < 2**-7


def test_loading_again_in_place_keeps_addresses_and_takes_effect() -> None:
    model, layers = build_native(Model, {}, random_weights().items())
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    other = random_weights(seed=1)
    load_weights(model, other.items(), Model.weight_map)
    layers.finalize(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    expected = RaggedBatch(*build_native(Model, {}, other.items())).logits(PROMPTS)
    for a, b in zip(RaggedBatch(model, layers).logits(PROMPTS), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_every_matrix_of_every_expert_has_to_be_there(part: str) -> None:
    weights = random_weights()
    name = f"layers.1.mlp.experts.3.{part}.weight"
    del weights[name]
    with pytest.raises(WeightsError, match="not in the checkpoint") as caught:
        load_weights(Model(NativeLayers(), {}), weights.items(), Model.weight_map)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"top_k": 6}, ["x.m.gate", "6 of 5"]),
        ({"top_k": 0}, ["x.m.gate", "0 of 5"]),
        ({"act": "swoosh"}, ["x.m.experts", "swoosh", "gelu"]),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(LayerArgumentError) as caught:
        NativeLayers().scope("x").moe("m", HIDDEN, INTERMEDIATE, norm_eps=1e-5, **CONFIG | changes)
    assert all(name in str(caught.value) for name in names)
