"""The native layer set: fused layers against compositions, names, tying, loading in place, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from mrv2.errors import LayerArgumentError, LayerNameError
from mrv2.layers import LayerSet, StepContext, Stream, WeightMap
from mrv2.layers import linear as linear_module
from mrv2.layers.native import NativeLayers, check_names
from mrv2.loader.weights import collect_slots, load_weights
from mrv2.testing.ragged import RaggedBatch, build_native

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 24, 4, 2, 8, 40, 31
ROPE = {"rope_type": "default", "rope_theta": 1e4}
EPS = 1e-5


class OpenAttention(nn.Module):
    """What `self_attention` is, from the small layers."""

    def __init__(self, L: LayerSet, *, window: int | None, qk_norm: bool, bias: bool, rope: dict[str, Any]) -> None:
        super().__init__()
        sizes = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
        self.norm = L.norm("norm", HIDDEN, eps=EPS)
        self.qkv_proj = L.packed("qkv_proj", HIDDEN, sizes, bias=bias)
        self.q_norm = L.norm("q_norm", HEAD_DIM, eps=EPS) if qk_norm else nn.Identity()
        self.k_norm = L.norm("k_norm", HEAD_DIM, eps=EPS) if qk_norm else nn.Identity()
        self.rotary = L.rotary("rotary", HEAD_DIM, rope, 64)
        self.attn = L.attention(
            "attn", num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=window, soft_cap=3.0
        )
        self.o_proj = L.down("o_proj", HEADS * HEAD_DIM, HIDDEN, bias=bias)

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        x, residual = ctx.prenorm(self.norm, h)
        q, k, v = self.qkv_proj.parts(x)
        q = self.q_norm(q.reshape(-1, HEADS, HEAD_DIM))
        k = self.k_norm(k.reshape(-1, KV_HEADS, HEAD_DIM))
        q, k = self.rotary(positions, q, k, ctx)
        return Stream(self.o_proj(self.attn(q, k, v.reshape(-1, KV_HEADS, HEAD_DIM), ctx)), residual)


class OpenMLP(nn.Module):
    """What `gated_mlp` is, from the small layers."""

    def __init__(self, L: LayerSet, *, bias: bool) -> None:
        super().__init__()
        self.norm = L.norm("norm", HIDDEN, eps=EPS)
        self.gate_up_proj = L.packed(
            "gate_up_proj", HIDDEN, {"gate_proj": INTERMEDIATE, "up_proj": INTERMEDIATE}, bias=bias
        )
        self.down_proj = L.down("down_proj", INTERMEDIATE, HIDDEN, bias=bias)

    def forward(self, h: Stream, ctx: StepContext) -> Stream:
        x, residual = ctx.prenorm(self.norm, h)
        gate, up = self.gate_up_proj.parts(x)
        return Stream(self.down_proj(nn.functional.gelu(gate, approximate="tanh") * up), residual)


class Block(nn.Module):
    def __init__(self, L: LayerSet, c: dict[str, Any]) -> None:
        super().__init__()
        if c["fused"]:
            self.self_attn = L.self_attention(
                "self_attn",
                HIDDEN,
                num_heads=HEADS,
                num_kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                rope=c["rope"],
                max_position=64,
                norm_eps=EPS,
                window=c["window"],
                qk_norm_eps=EPS if c["qk_norm"] else None,
                bias=c["bias"],
                out_bias=c["bias"],
                soft_cap=3.0,
            )
            self.mlp = L.gated_mlp("mlp", HIDDEN, INTERMEDIATE, norm_eps=EPS, act="gelu_new", bias=c["bias"])
        else:
            self.self_attn = OpenAttention(
                L.scope("self_attn"), window=c["window"], qk_norm=c["qk_norm"], bias=c["bias"], rope=c["rope"]
            )
            self.mlp = OpenMLP(L.scope("mlp"), bias=c["bias"])

    def forward(self, h: Stream, positions: Tensor, ctx: StepContext) -> Stream:
        return self.mlp(self.self_attn(h, positions, ctx), ctx)


class Model(nn.Module):
    weight_map = WeightMap()
    parts = ()
    recurrent = False

    def __init__(self, L: LayerSet, config: dict[str, Any]) -> None:
        super().__init__()
        c = {"fused": True, "window": None, "qk_norm": False, "bias": False, "tied": False, "rope": ROPE} | config
        self.embed = L.embedding("embed", VOCAB, HIDDEN, shared_with_head=c["tied"])
        self.layers = L.stack("layers", 2, lambda L, i: Block(L, c))
        self.norm = L.final_norm("norm", HIDDEN, eps=EPS)
        self.lm_head = L.lm_head(
            "lm_head", VOCAB, HIDDEN, tied_to=self.embed if c["tied"] else None, scale=0.5, soft_cap=4.0
        )

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        h = ctx.run(self.layers, ctx.embed(self.embed, input_ids), positions)
        return ctx.finish(self.norm, h)


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    slots = collect_slots(Model(NativeLayers(), config))
    return {name: 0.3 * torch.randn(s.slot.shape, generator=g) for name, s in slots.items() if not s.tied}


PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 0, 7, 7, 7, 2, 11, 20, 4, 4, 9, 17]]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_fused_layers_equal_compositions(window: int | None, bias: bool, qk_norm: bool) -> None:
    config = {"window": window, "bias": bias, "qk_norm": qk_norm}
    weights = random_weights(config)
    fused, composed = (
        RaggedBatch(*build_native(Model, config | {"fused": f}, weights.items())).logits(PROMPTS, chunks=(4, 1))
        for f in (True, False)
    )
    for a, b in zip(fused, composed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rope", [ROPE, ROPE | {"partial_rotary_factor": 0.5}], ids=["whole", "half"])
def test_one_token_at_a_time_equals_compositions(window: int | None, bias: bool, qk_norm: bool, rope: dict) -> None:
    config = {"window": window, "bias": bias, "qk_norm": qk_norm, "rope": rope}
    weights = random_weights(config)
    alone = RaggedBatch(*build_native(Model, config, weights.items()))
    assert alone.one_token is not None
    composed = RaggedBatch(*build_native(Model, config | {"fused": False}, weights.items()))
    for prompt, expected in zip(PROMPTS, composed.logits(PROMPTS), strict=True):
        torch.testing.assert_close(alone.logits([prompt], chunks=(1,))[0], expected, rtol=1e-5, atol=1e-5)


def test_what_a_single_token_leaves_in_the_stream_is_its_own() -> None:
    model, layers = build_native(Model, {}, random_weights({}).items())
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], out: Stream) -> None:
        kept.append((out.x, out.x.clone()))

    for layer in model.layers:
        layer.self_attn.register_forward_hook(keep)
        layer.mlp.register_forward_hook(keep)
    RaggedBatch(model, layers).logits(PROMPTS[1:2], chunks=(1,))
    assert len(kept) == 4 * len(PROMPTS[1])
    assert all(torch.equal(now, then) for now, then in kept)


def test_parameter_and_cache_names_are_equal_too() -> None:
    config = {"window": 3, "bias": True, "qk_norm": True}
    fused, composed = NativeLayers(), NativeLayers()
    a, b = Model(fused, config), Model(composed, config | {"fused": False})
    assert dict(a.named_parameters()).keys() == dict(b.named_parameters()).keys()
    assert collect_slots(a).keys() == collect_slots(b).keys()
    assert fused.caches == composed.caches
    assert list(fused.caches) == ["layers.0.self_attn.attn", "layers.1.self_attn.attn"]


def test_slots_have_unpacked_names() -> None:
    names = collect_slots(Model(NativeLayers(), {"bias": True})).keys()
    assert {f"layers.1.self_attn.{p}_proj.{w}" for p in "qkvo" for w in ("weight", "bias")} <= names
    assert {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")} <= names
    assert not any("qkv" in name or "gate_up" in name for name in names)


def test_logits_are_scaled_then_capped() -> None:
    weights = random_weights({})
    model, _ = build_native(Model, {}, weights.items())
    hidden = torch.randn(3, HIDDEN) * 4
    plain = hidden @ weights["lm_head.weight"].T
    torch.testing.assert_close(model.lm_head(hidden), 4 * torch.tanh(0.5 * plain / 4))


# -- tying, devices, loading in place ------------------------------------------------------------------------


def test_a_tied_head_reads_the_embedding_and_follows_it() -> None:
    weights = random_weights({"tied": True})
    model, layers = build_native(Model, {"tied": True}, weights.items())
    hidden = torch.randn(5, HIDDEN)
    assert [n for n, _ in model.named_parameters() if "lm_head" in n] == []
    for w in (weights["embed.weight"], torch.randn(VOCAB, HIDDEN)):
        load_weights(model, (weights | {"embed.weight": w}).items(), Model.weight_map)
        torch.testing.assert_close(model.lm_head(hidden), 4 * torch.tanh(0.5 * (hidden @ w.T) / 4))
        layers.finalize(model)
        torch.testing.assert_close(model.lm_head(hidden), 4 * torch.tanh(0.5 * (hidden @ w.T) / 4))


def test_a_model_built_on_meta_declares_caches_and_can_be_given_memory() -> None:
    layers = NativeLayers()
    with torch.device("meta"):
        model = Model(layers, {"tied": True, "window": 5})
    assert all(p.is_meta for p in model.parameters())
    assert {c.window for c in layers.caches.values()} == {5}

    weights = random_weights({"tied": True, "window": 5})
    model.to_empty(device="cpu")
    load_weights(model, weights.items(), Model.weight_map)
    layers.finalize(model)
    expected = RaggedBatch(*build_native(Model, {"tied": True, "window": 5}, weights.items())).logits(PROMPTS)
    for a, b in zip(RaggedBatch(model, layers).logits(PROMPTS), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("finalize", [True, False])
def test_loading_again_in_place_keeps_addresses_and_takes_effect(finalize: bool) -> None:
    model, layers = build_native(Model, {"bias": True}, random_weights({"bias": True}).items())
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    batch = RaggedBatch(model, layers)
    batch.logits(PROMPTS)
    batch.logits(PROMPTS[1:2], chunks=(1,))

    other = random_weights({"bias": True}, seed=1)
    load_weights(model, other.items(), Model.weight_map)
    if finalize:
        layers.finalize(model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == addresses
    expected = RaggedBatch(*build_native(Model, {"bias": True}, other.items())).logits(PROMPTS)
    for a, b in zip(batch.logits(PROMPTS), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.logits(PROMPTS[1:2], chunks=(1,))[0], expected[1], rtol=1e-5, atol=1e-5)


def test_without_onednn_the_results_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights({})
    expected = RaggedBatch(*build_native(Model, {}, weights.items())).logits(PROMPTS)
    monkeypatch.setattr(linear_module, "onednn_linear", lambda: None)
    for a, b in zip(RaggedBatch(*build_native(Model, {}, weights.items())).logits(PROMPTS), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_packing_stays_within_its_budget() -> None:
    model, _ = build_native(Model, {}, random_weights({}).items())
    linears = [m for m in model.modules() if isinstance(m, linear_module.LinearBase)]
    sizes = [m.pack_bytes() for m in linears]
    if linear_module.onednn_linear() is None:
        pytest.skip("this PyTorch has no oneDNN linear")
    assert all(size >= m.full_weight().nbytes for size, m in zip(sizes, linears, strict=True))
    assert linear_module.pack_linears(model, 0) == 0
    assert linear_module.pack_linears(model, sizes[0]) == sizes[0]
    assert linear_module.pack_linears(model, 2**40) == sum(sizes)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 200])
def test_projections_and_norms_of_any_number_of_tokens(num_tokens: int) -> None:
    layers = NativeLayers()
    linear, norm = layers.down("a", HIDDEN, 17, bias=True), layers.norm("b", HIDDEN, eps=EPS)
    for p in [*linear.parameters(), *norm.parameters()]:
        p.copy_(torch.randn(p.shape))
    both = nn.ModuleDict({"a": linear, "b": norm})
    layers.finalize(both)
    x = torch.randn(num_tokens, HIDDEN)
    torch.testing.assert_close(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (HIDDEN,), norm.weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_norm_equals_transformers(dtype: torch.dtype, scale: float) -> None:
    layers = NativeLayers()
    norm, reference = layers.norm("n", HIDDEN, eps=EPS), LlamaRMSNorm(HIDDEN, EPS)
    weight = torch.randn(HIDDEN).to(dtype)
    norm.weight.data, reference.weight.data = weight.clone(), weight.clone()
    layers.finalize(norm)
    x = (torch.randn(4, HIDDEN) * scale).to(dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(norm(x), reference(x), **tolerance)


# -- refusals ------------------------------------------------------------------------------------------------


def wrong_name(L: LayerSet) -> nn.Module:
    model = Model(L, {})
    model.extra = L.down("other", 4, 4)
    return model


def missing_scope(L: LayerSet) -> nn.Module:
    model = Model(L, {})
    model.inner = nn.ModuleDict({"norm2": L.norm("norm2", 4, eps=EPS)})
    return model


def never_stored(L: LayerSet) -> nn.Module:
    L.down("lost", 4, 4)
    return Model(L, {})


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (wrong_name, ["other", "extra"]),
        (missing_scope, ["norm2", "inner.norm2"]),
        (never_stored, ["lost", "nothing"]),
    ],
)
def test_wrong_names_are_refused(make: Callable[[LayerSet], nn.Module], names: list[str]) -> None:
    layers = NativeLayers()
    with pytest.raises(LayerNameError) as caught:
        check_names(make(layers), layers)
    assert all(name in caught.value.what for name in names)


def test_right_names_pass() -> None:
    layers = NativeLayers()
    model = Model(layers, {"fused": False, "qk_norm": True})
    model.gain = layers.param("gain", (3,))
    check_names(model, layers)
    assert collect_slots(model)["gain"].slot.shape == (3,)


ATTENTION = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "window": None}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda L: L.attention("a", **ATTENTION | {"num_kv_heads": 3}), ["x.a", "4", "3"]),
        (lambda L: L.attention("a", **ATTENTION | {"window": 0}), ["x.a", "window of 0"]),
        (lambda L: L.gated_mlp("m", 8, 16, norm_eps=EPS, act="swoosh"), ["x.m", "swoosh", "gelu"]),
        (lambda L: L.lm_head("h", 9, 8, tied_to=L.embedding("e", 9, 4)), ["x.h", "9 x 8", "(9, 4)"]),
        (lambda L: L.lm_head("h", 9, 8, tied_to=nn.Embedding(9, 8)), ["x.h", "didn't build"]),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[LayerSet], nn.Module], names: list[str]) -> None:
    with pytest.raises(LayerArgumentError) as caught:
        make(NativeLayers().scope("x"))
    assert all(name in str(caught.value) for name in names)


def test_equal_rotary_configurations_share_one_table() -> None:
    layers = NativeLayers()
    model = Model(layers, {})
    tables = {id(m.rotary.table) for m in (layer.self_attn for layer in model.layers)}
    assert len(tables) == 1
    assert layers.rope_fixed_up_to is None
    layers.rotary("r", HEAD_DIM, {"rope_type": "dynamic", "factor": 2.0}, 50)
    assert layers.rope_fixed_up_to == 50
