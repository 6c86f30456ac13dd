"""Errors within the bound that come at once, and what is told where attention can't be looked into."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import mrv2_adapter_llama
from mrv2.cli.app import run
from mrv2.frontend.build import load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.testing import tiny_config
from mrv2.testing.activations import of_module, of_transformers
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.parity import compare_modules, to_dict
from mrv2.testing.points import GROWTH, Point, bound_of, growth_of

CLEAN = Path(mrv2_adapter_llama.__file__).parent
IDS = [3, 17, 44, 2, 9, 60, 31, 8, 25, 13, 55, 1, 40, 22, 7, 19]


def with_gates(folder, factor):
    """A checkpoint with wide gates, as trained models have: what both kinds of GELU differ by is small beside them."""
    config = tiny_config("MistralConfig", sliding_window=6, num_hidden_layers=2, hidden_act="gelu_pytorch_tanh")
    make_checkpoint(folder, config, seed=5)
    tensors = load_file(folder / "model.safetensors")
    wide = {n: t * factor if "gate_proj" in n else t for n, t in tensors.items()}
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return with_gates(tmp_path_factory.mktemp("small"), 16)


@pytest.fixture
def planted(tmp_path, checkpoint, request):
    """planted(old, new) -> the model with one change in its code, and the package."""

    def plant(old, new):
        name = re.sub(r"\W", "_", f"small_{request.node.name}")
        package = tmp_path / name
        shutil.copytree(CLEAN, package, ignore=shutil.ignore_patterns("__pycache__", "conformance.json"))
        for file in package.glob("*.py"):
            file.write_text(file.read_text().replace("mrv2_adapter_llama", name))
        text = (package / "model.py").read_text()
        assert text.count(old) == 1
        (package / "model.py").write_text(text.replace(old, new))
        return load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"), [str(package)]), package

    return plant


EXACT = ("act=c.hidden_act,\n            bias", 'act="gelu",\n            bias')


def test_the_exact_gelu_in_place_of_its_approximation_is_told(planted, checkpoint, capsys):
    changed, package = planted(*EXACT)
    found = compare_modules(changed, of_transformers(checkpoint, IDS, torch.float32), device="cpu")
    assert found.first is None, found.first
    assert found.growth.point.name == "in.model.layers.0.mlp.down_proj"
    assert found.growth.factor > GROWTH
    assert any("activation" in cause for cause in found.causes)
    assert to_dict(found)["growth"]["point"] == "in.model.layers.0.mlp.down_proj"
    argv = ["parity", str(checkpoint), "--device", "cpu", "--adapter", str(package)]
    assert run([*argv, "--html", str(package / "page.html")]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"warning: within the bound, but the error grows \d+-fold at model.layers.0.mlp.down_proj \(input\)", out
    )
    assert "likely causes of the growth" in out
    assert "error grows" in (package / "page.html").read_text()


def test_a_difference_that_began_before_is_led_back_to_where_it_grew(planted, tmp_path, capsys):
    _, package = planted(*EXACT)
    folder = with_gates(tmp_path / "checkpoint", 4)
    assert run(["parity", str(folder), "--device", "cpu", "--adapter", str(package), "--tokens", "48"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"grows \d+-fold at model.layers.0.mlp.down_proj \(input\)", out)
    assert re.search(r"first difference: model.layers.1", out)
    assert "likely causes of the growth" in out


def test_a_right_model_is_not_warned_of(checkpoint):
    clean = load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"), [str(CLEAN)])
    for seed in range(3):
        ids = torch.randint(0, clean.config.vocab_size, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        found = compare_modules(clean, of_transformers(checkpoint, ids, torch.float32), device="cpu")
        assert (found.first, found.growth, found.causes) == (None, None, ())
        assert max(p.error for p in found.points) < found.bound / 5


def test_growth_is_beside_what_came_before_and_never_from_nothing():
    def grown(*sizes, dtype=torch.float32):
        points = [Point(name=f"out.{i}", error=size, position=-1) for i, size in enumerate(sizes)]
        return growth_of(points, bound_of(dtype, "cpu"), dtype)

    assert grown(0.0, 1e-7, 4e-7) is None
    assert grown(2e-7, 3e-6, 5e-5) is None  # depth
    assert grown(2e-7, 5e-5).point.name == "out.1"
    assert grown(2e-7, 5e-5, 1.0).point.name == "out.1"  # what follows is of it
    assert grown(2e-7, 1.0, 5e-5) is None  # a difference, not a warning
    assert grown(2e-7, float("nan"), 5e-5) is None
    assert grown(0.0, 9e-2, dtype=torch.bfloat16) is None


def test_a_gpu_has_more_room_in_float32():
    assert bound_of(torch.float32, "cuda:0") > bound_of(torch.float32, "cpu")
    assert bound_of(torch.bfloat16, "cuda:0") == bound_of(torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (("bias=bias,\n            out_bias", "bias=bias,\n            scale=0.9,\n            out_bias"), 0),
        (("rope=rope_parameters(c, whole_heads=True)", 'rope={"rope_type": "default", "rope_theta": 50.0}'), 0),
        (("size: int | None = c.sliding_window\n        return size", "return None"), 1),
    ],
    ids=["scale", "rotation", "window"],
)
def test_what_attention_makes_is_to_blame_where_queries_keys_and_values_agree(change, cause, planted, checkpoint):
    changed, _ = planted(*change)
    # Its attention is no function that is watched, as in most training code: projections are all that is seen.
    module = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="sdpa").eval()
    found = compare_modules(changed, of_module(module, IDS, "own", use_cache=False), device="cpu")
    assert found.first.name == "in.model.layers.0.self_attn.o_proj"
    if cause:
        assert found.causes[0] == "a window: the first difference is at position 6"
    blamed = next(c for c in found.causes if "scale of scores" in c)
    assert blamed.startswith("rotation (its base, layout or positions), the scale of scores, a soft cap, or a window")
    assert "q_proj, k_proj, v_proj agree" in blamed
    assert any(c.startswith("the order of heads") for c in found.causes)


def test_a_gate_stays_a_gate(planted, checkpoint):
    """The hint of attention is for attention's projection alone."""
    changed, _ = planted("act=c.hidden_act,\n            bias", 'act="relu",\n            bias')
    found = compare_modules(changed, of_transformers(checkpoint, IDS, torch.float32), device="cpu")
    assert found.first.name == "in.model.layers.0.mlp.down_proj"
    assert "rotation" not in " ".join(found.causes)
    assert json.loads(json.dumps(to_dict(found)))["growth"] is None
