"""The fused layers' two ways, composed and by fused kernels, give the same logits: twins, interpreted, on a GPU."""

import pytest
import torch
from torch import nn

from mrv2.kernels.token_tile import MOST_TOKENS
from mrv2.layers import WeightMap
from mrv2.layers.native import NativeLayers
from mrv2.loader.weights import collect_slots
from mrv2.testing.ragged import RaggedBatch, build_native

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 24, 4, 2, 8, 40, 31
PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [30, 0, 7, 7, 7, 2, 11, 20, 4, 4, 9, 17]]
VARIANTS = {
    "plain": {"window": None},
    "window": {"window": 3},
    "biased": {"window": None, "bias": True},
    "qk-norm": {"window": None, "qk_norm_eps": 1e-3},
    "partial-rotary": {"window": 5, "qk_norm_eps": 1e-6, "partial": 0.5},
}


class Block(nn.Module):
    def __init__(self, L, variant, way):
        super().__init__()
        given = dict(variant)
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": given.pop("partial", 1.0)}
        self.way = way
        self.self_attn = L.self_attention(
            "self_attn",
            HIDDEN,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rope=rope,
            max_position=64,
            norm_eps=1e-5,
            **given,
        )
        self.mlp = L.gated_mlp("mlp", HIDDEN, INTERMEDIATE, norm_eps=1e-5, act="gelu_new")

    def forward(self, h, positions, ctx):
        if self.way == "few" and len(positions) <= MOST_TOKENS:
            return self.mlp.forward_few(self.self_attn.forward_few(h, positions, ctx))
        if self.way == "kernels":
            return self.mlp.forward_fused(self.self_attn.forward_fused(h, positions, ctx))
        return self.mlp(self.self_attn(h, positions, ctx), ctx)


class Model(nn.Module):
    weight_map = WeightMap()
    parts = ()
    recurrent = False

    def __init__(self, L, config):
        super().__init__()
        self.embed = L.embedding("embed", VOCAB, HIDDEN)
        self.layers = L.stack("layers", 2, lambda L, i: Block(L, *config))
        self.norm = L.final_norm("norm", HIDDEN, eps=1e-5)
        self.lm_head = L.lm_head("lm_head", VOCAB, HIDDEN)

    def forward(self, input_ids, positions, ctx):
        h = ctx.run(self.layers, ctx.embed(self.embed, input_ids), positions)
        return ctx.finish(self.norm, h)


@pytest.fixture(params=VARIANTS)
def logits(request):
    """logits(way, device, padding): those of `PROMPTS` in chunks, the same weights each time."""
    variant = VARIANTS[request.param]
    generator = torch.Generator().manual_seed(0)
    slots = collect_slots(Model(NativeLayers(), (variant, "composed")))
    weights = {n: 0.3 * torch.randn(s.slot.shape, generator=generator) for n, s in slots.items()}

    def run(way, device="cpu", padding=0):
        with torch.device(device):
            model, layers = build_native(Model, (variant, way), weights.items())
        if way == "few":  # whose kernels want rows, as a GPU has them
            for parameter in model.parameters():
                parameter.data = parameter.data.contiguous()
        batch = RaggedBatch(model, layers)
        return [x.cpu() for x in batch.logits(PROMPTS, chunks=(4, 1), padding=padding)]

    return run


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


WAYS = pytest.mark.parametrize("way", ["kernels", "few"])


@WAYS
def test_kernels_equal_the_composition(logits, way):
    assert_same(logits(way), logits("composed"))


@WAYS
def test_interpreted_kernels_equal_the_composition(logits, monkeypatch, way):
    if torch.cuda.is_available():
        pytest.skip("Triton was imported for the GPU")
    want = logits("composed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert_same(logits(way, padding=2), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpu_takes_the_kernels_and_equals_the_cpu(logits, monkeypatch):
    from mrv2.layers import fused

    calls = []
    kernel = fused.qk_norm_rope_cache
    monkeypatch.setattr(fused, "qk_norm_rope_cache", lambda **given: calls.append(1) or kernel(**given))
    want = logits("composed")
    assert not calls
    assert_same(logits("composed", device="cuda", padding=2), want)
    assert calls
