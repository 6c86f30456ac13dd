"""Layers that stand for all of their kind."""

from torch import nn

from mrv2.layers.each_kind import each_kind
from mrv2.layers.native import NativeLayers


def test_one_layer_of_each_kind_stands_for_all():
    layers = NativeLayers()

    def attention(
        name: str, window: int | None = None, qk_norm_eps: float | None = None, theta: float = 1e4
    ) -> nn.Module:
        return layers.self_attention(
            name,
            24,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            rope={"rope_type": "default", "rope_theta": theta},
            max_position=64,
            norm_eps=1e-5,
            window=window,
            qk_norm_eps=qk_norm_eps,
        )

    def mlp(name: str, size: int = 40, act: str = "silu") -> nn.Module:
        return layers.gated_mlp(name, 24, size, norm_eps=1e-5, act=act)

    model = nn.ModuleDict(
        {
            "first": attention("first"),
            "same": attention("same"),
            "window": attention("window", window=8),
            "normed": attention("normed", qk_norm_eps=1e-5),
            "rope": attention("rope", theta=1e6),
            "mlp": mlp("mlp"),
            "same_mlp": mlp("same_mlp"),
            "act": mlp("act", act="gelu_new"),
            "size": mlp("size", 48),
        }
    )
    kinds = list(each_kind(model))
    found = [name for name, layer in model.items() if any(layer is kind for kind in kinds)]
    assert found == ["first", "window", "normed", "rope", "mlp", "act", "size"]
