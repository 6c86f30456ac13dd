"""What the compiler is given is, operation by operation, what vLLM's own class gives it, and so are rotary tables.

Then what it makes of both is the same too: a compiler keeps more digits within what it fuses, and what it fuses depends
on orders and sizes.
"""

import pytest
import torch
from torch import Tensor
from torch.fx import node as fx


@pytest.fixture
def compiled(monkeypatch):
    """The operations of each graph that is compiled from now on. It runs as it was captured."""
    from vllm.config import CompilationConfig

    found = []

    def compile_nothing(module, inputs):
        found.append(operations(module.graph))
        return module.forward

    monkeypatch.setattr(CompilationConfig, "init_backend", lambda self, *args, **kwargs: compile_nothing)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    return found


def operations(graph):
    """Per operation: what it is, what it takes, other operations by their places, and what comes out. No names."""
    places = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    return [
        (
            "input" if node.op == "placeholder" else getattr(node.target, "__name__", node.target),
            None if node.op == "placeholder" else str(fx.map_arg((node.args, node.kwargs), places.__getitem__)),
            shape_of(node.meta.get("example_value")),
        )
        for node in graph.nodes
    ]


def shape_of(value):
    if isinstance(value, Tensor):
        return str(value.dtype), [str(n) for n in value.shape], [str(n) for n in value.stride()]
    return type(value).__name__


@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_the_graph_is_that_of_vllms_class(config_class, family, engine, compiled, generate):
    one = family(config_class, num_attention_heads=2, num_key_value_heads=1)
    names = one.architecture, one.architecture.removeprefix("Mrv2")
    for architecture in names:
        # Shorter than the model allows: a table made for it would be shorter than vLLM's.
        settings = {"hf_overrides": {"architectures": [architecture]}, "max_model_len": 128}
        with engine(one.folder, **settings, enforce_eager=False) as llm:
            generate(llm, [[1, 2, 3]], 2)
    ours, theirs = compiled
    assert len(ours) > 200
    for i, (got, want) in enumerate(zip(ours, theirs, strict=True)):
        assert got == want, f"operation {i}"


@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen3Config"])
def test_vllm_makes_the_plain_rotary_table(config_class, family, engine, runner_of, monkeypatch):
    """On a GPU its frequencies aren't ours to the last bit; here they are made to be something else."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    plain = RotaryEmbedding._compute_inv_freq
    monkeypatch.setattr(RotaryEmbedding, "_compute_inv_freq", lambda self, base: 2 * plain(self, base))
    one = family(config_class, num_attention_heads=2, num_key_value_heads=1)
    tables = []
    for architecture in (one.architecture, one.architecture.removeprefix("Mrv2")):
        settings = {"hf_overrides": {"architectures": [architecture]}, "max_model_len": 128}
        with engine(one.folder, **settings) as llm:
            modules = runner_of(llm).model.modules()
            tables.append(next(m.cos_sin_cache.clone() for m in modules if isinstance(m, RotaryEmbedding)))
    ours, theirs = tables
    assert ours.shape == (256, 32)
    assert torch.equal(ours, theirs)
    assert ours[1, 0] == torch.tensor(2.0).cos()
