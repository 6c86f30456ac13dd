# ruff: noqa: E501 - patches are easier to read in one line
"""Models with one defect each, and the module at which `mrv2 parity` has to find it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import mrv2_adapter_llama
from mrv2.cli.app import run
from mrv2.errors import TargetError
from mrv2.frontend.build import load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.testing import tiny_config
from mrv2.testing.activations import Activations, of_callable, of_file, of_transformers, read_names
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.parity import bars, compare_modules

CLEAN = Path(mrv2_adapter_llama.__file__).parent
IDS = [3, 17, 44, 2, 9, 60, 31, 8, 25, 13, 55, 1, 40, 22, 7, 19]
BLOCK = "        self.mlp = self.feed_forward(L, c)\n"


def transform(body):
    """A weight map that changes tensors, for Mistral."""
    code = "def _change(tensors: Any) -> Any:\n    for name, t in tensors:\n        "
    return (
        'class MistralForCausalLM(CausalLM):\n    """Mistral."""\n',
        f'{code}{body}\n        yield name, t\n\n\nclass MistralForCausalLM(CausalLM):\n    """Mistral."""\n\n    weight_map = WeightMap(rename=CausalLM.weight_map.rename, transform=_change)\n',
    )


def forward(body):
    """A block's own `forward`."""
    return BLOCK, f"{BLOCK}\n    def forward(self, h, positions, ctx):  # type: ignore\n        {body}\n"


@dataclass(frozen=True)
class Defect:
    name: str
    change: tuple[str, str]
    point: str
    says: str


DEFECTS = [
    Defect("a norm's epsilon", ("norm_eps=c.rms_norm_eps,\n            window", "norm_eps=0.5,\n            window"),
           "out.model.layers.0.self_attn.norm", "epsilon"),
    Defect("norms stored as offsets", transform('t = t - 1 if name.endswith("post_attention_layernorm.weight") or name.endswith("mlp.norm.weight") else t'),
           "out.model.layers.0.mlp.norm", "norm offset: the reference's gain is ours plus one"),
    Defect("the scale of scores", ("bias=bias,\n            out_bias", "bias=bias,\n            scale=0.9,\n            out_bias"),
           "out.model.layers.0.self_attn.attn", "scale of scores"),
    Defect("a window that is forgotten", ("size: int | None = c.sliding_window\n        return size", "return None"),
           "out.model.layers.0.self_attn.attn", "first difference is at position 6"),
    Defect("another base of rotation", ("rope=rope_parameters(c, whole_heads=True)", 'rope={"rope_type": "default", "rope_theta": 50.0}'),
           "q.model.layers.0.self_attn.attn", "another base"),
    Defect("rotated pairs side by side", transform('t = t.unflatten(0, (-1, 2, 16)).transpose(1, 2).flatten(0, 2) if "q_proj" in name or "k_proj" in name else t'),
           "out.model.layers.0.self_attn.q_proj", "rope layout: "),
    Defect("gate and up exchanged", transform('name = name.replace("gate_proj", "x").replace("up_proj", "gate_proj").replace("x", "up_proj")'),
           "out.model.layers.0.mlp.gate_proj", "argument order"),
    Defect("another activation", ("act=c.hidden_act,\n            bias", 'act="gelu",\n            bias'),
           "in.model.layers.0.mlp.down_proj", "activation"),
    Defect("a residual left out", forward("h = self.self_attn(h, positions, ctx); return self.mlp(type(h)(h.x, None), ctx)"),
           "out.model.layers.0.mlp.norm", "a residual left out"),
    Defect("what a layer adds, added twice in the last one",
           forward("h = self.mlp(self.self_attn(h, positions, ctx), ctx); return type(h)(h.x * self.twice + h.residual, None) if self.last else h"),
           "out.model.layers.2", "a residual left out or added twice"),
    Defect("the scale of embeddings", transform('t = t * 3 if "embed_tokens" in name else t'),
           "out.model.embed_tokens", "ours is 3 times"),
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("MistralConfig", sliding_window=6, num_hidden_layers=3, rms_norm_eps=1e-5)
    return make_checkpoint(tmp_path_factory.mktemp("mistral"), config, seed=5)


@pytest.fixture(scope="module")
def clean(checkpoint):
    return load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"), [str(CLEAN)])


@pytest.fixture(scope="module")
def answer(checkpoint):
    return of_transformers(checkpoint, IDS, torch.float32)


def plant(defect, folder, name="planted"):
    package = folder / f"{name}_{DEFECTS.index(defect)}"
    shutil.copytree(CLEAN, package, ignore=shutil.ignore_patterns("__pycache__", "conformance.json"))
    for file in package.glob("*.py"):
        file.write_text(file.read_text().replace("mrv2_adapter_llama", package.name))
    old, new = defect.change
    text = (package / "model.py").read_text()
    assert text.count(old) == 1, f"the sample has it {text.count(old)} times"
    text = text.replace(old, new)
    if "self.last" in new:
        text = text.replace(
            "        self.mlp = self.feed", "        self.last, self.twice = i == 2, 2.0\n        self.mlp = self.feed"
        )
    (package / "model.py").write_text(text)
    return package


def test_the_clean_sample_agrees(clean, answer):
    found = compare_modules(clean, answer, device="cpu")
    assert found.first is None, found.first
    names = [p.name for p in found.points]
    for name in ("out.model.embed_tokens", "q.model.layers.1.self_attn.attn", "out.model.layers.2", "out.lm_head"):
        assert name in names
    assert len(names) > 40
    assert [p.module for p in found.depth] == ["model.layers.0", "model.layers.1", "model.layers.2"]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_a_defect_is_found_at_its_module(defect, checkpoint, answer, tmp_path):
    package = plant(defect, tmp_path)
    loaded = load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"), [str(package)])
    found = compare_modules(loaded, answer, device="cpu")
    assert found.first is not None, "the defect goes unnoticed"
    assert found.first.name == defect.point, (found.first, found.causes)
    assert any(defect.says in cause for cause in found.causes), found.causes


# -- references ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(checkpoint, tmp_path_factory):
    """What a training repository would leave: recorded by the one file, in another process without this package."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "record_activations.py").write_text(printed_recorder())
    (folder / "train.py").write_text(
        "import sys, torch\nfrom record_activations import Recorder\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)\n"
        f"ids = torch.tensor([{IDS}])\nwith torch.no_grad(), Recorder(model) as recorder:\n"
        "    logits = model(ids, use_cache=False).logits\nrecorder.save('dump.safetensors', ids, logits)\n"
        "assert not any(name.partition('.')[0] == 'mrv2' for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "train.py", str(checkpoint)], cwd=folder, check=True, timeout=200)
    return folder / "dump.safetensors"


def printed_recorder():
    from mrv2.testing.recorders import record_activations

    return Path(record_activations.__file__).read_text()


def test_recorded_activations_agree_and_other_names_are_mapped(clean, recorded, tmp_path):
    found = compare_modules(clean, of_file(recorded), device="cpu")
    assert found.first is None
    assert len(found.points) > 35
    renamed = {re.sub(r"model\.layers\.", "blocks.", n): t for n, t in load_file(recorded).items()}
    assert not any("model.layers" in n for n in renamed)
    np.savez(tmp_path / "dump.npz", **{n: t.numpy() for n, t in renamed.items()})
    (tmp_path / "names.json").write_text(json.dumps({r"^blocks\.": "model.layers."}))
    names = read_names(tmp_path / "names.json")
    again = compare_modules(clean, of_file(tmp_path / "dump.npz"), device="cpu", names=names)
    assert [p.name for p in again.points] == [p.name for p in found.points]
    assert again.first is None
    assert len(compare_modules(clean, of_file(tmp_path / "dump.npz"), device="cpu").unmatched) > 20


def test_a_residual_kept_apart_and_a_buffer_written_again_are_named(clean, answer):
    tensors = dict(answer.tensors)
    apart = tensors | {"out.model.layers.1": tensors["out.model.layers.1.mlp"]}
    found = compare_modules(clean, Activations(name="apart", ids=IDS, tensors=apart), device="cpu")
    assert found.first.name == "out.model.layers.1"
    assert found.causes[0].startswith("residual kept apart")
    again = tensors | {f"out.model.layers.{i}": tensors["out.model.layers.2"] for i in range(3)}
    found = compare_modules(clean, Activations(name="buffer", ids=IDS, tensors=again), device="cpu")
    assert found.first.name == "out.model.layers.0"
    assert found.causes[0].startswith("in-place buffer")


def test_bounds_go_by_the_coarser_dtype(checkpoint, clean, answer):
    half = load(str(checkpoint), EngineConfig(device="cpu", dtype="bfloat16"), [str(CLEAN)])
    found = compare_modules(half, answer, device="cpu")
    assert found.dtype == "bfloat16"
    assert found.first is None, found.first
    assert max(p.error for p in found.points) > 5e-4  # which float32 would have refused


def test_what_has_another_shape_is_told_and_never_left_out(clean, answer):
    width = {"out.model.layers.1": torch.ones(16, 7)}
    found = compare_modules(clean, Activations(name="w", ids=IDS, tensors=dict(answer.tensors) | width), device="cpu")
    assert found.misshapen == ("out.model.layers.1 (7 values a token, ours 64)",)
    rows = {"out.model.layers.1": torch.ones(15, 64)}
    found = compare_modules(clean, Activations(name="r", ids=IDS, tensors=dict(answer.tensors) | rows), device="cpu")
    assert found.misshapen[0].startswith("out.model.layers.1 ([15, 64], which isn't one row for each of 16 tokens")
    assert "model.layers.1" not in found.unmatched
    with pytest.raises(TargetError, match=r"has the shape of ours: out\.model\.layers\.1 has 7 values a token"):
        compare_modules(clean, Activations(name="w", ids=IDS, tensors=width), device="cpu")


def test_what_is_no_number_is_named_with_its_position(clean, answer):
    broken = answer.tensors["out.model.layers.1"].clone()
    broken[0, 5] = float("nan")
    tensors = dict(answer.tensors) | {"out.model.layers.1": broken}
    found = compare_modules(clean, Activations(name="nan", ids=IDS, tensors=tensors), device="cpu")
    assert (found.first.name, found.first.position) == ("out.model.layers.1", 5)
    assert "reference's own values" in found.causes[0]


OWN = """
import numpy, torch

class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.drop = torch.nn.Embedding(61, 64), torch.nn.Dropout(0.9)

    def forward(self, ids):
        assert not self.training
        return self.drop(self.embed_tokens(ids))

class Fails(torch.nn.Module):
    def forward(self, ids): raise ValueError("needs a mask")

def arrays(folder): return lambda ids: {"out.model.layers.0": numpy.zeros((len(ids), 64), "float32")}
def dropped(folder): return Dropped()
def raises(folder): raise RuntimeError("no accelerator")
def raises_later(folder): return lambda ids: 1 / 0
def leaves(folder): raise SystemExit(3)
def other(folder): return lambda ids: {"out.a": 3}
def unnamed(folder): return lambda ids: {"lm_head": torch.zeros(1)}
def fails(folder): return Fails()
number = 4
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "of_mine.py").write_text(OWN)
    (tmp_path / "of_mine_broken.py").write_text("raise OSError('no disk')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    for name in ("of_mine", "of_mine_broken"):
        sys.modules.pop(name, None)


def test_a_module_in_this_folder_is_a_reference(own_module, tmp_path):
    assert of_callable("of_mine:arrays", tmp_path, IDS).tensors["out.model.layers.0"].shape == (16, 64)
    assert "out.embed_tokens" in of_callable("of_mine:dropped", tmp_path, IDS).tensors


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("of_mine:absent", "no attribute 'absent'"), ("of_absent:f", "No module named 'of_absent'"),
        ("of_mine_broken:f", r"no disk, raised at .*of_mine_broken.py:1"),
        ("of_mine:raises", r"no accelerator, raised at .*of_mine.py:\d+"), ("of_mine:raises_later", "ZeroDivisionError"),
        ("of_mine:leaves", "SystemExit: 3"), ("of_mine:other", "a int as 'out.a'"), ("of_mine:unnamed", "no name begins"),
        ("of_mine:fails", "needs a mask"), ("of_mine:number", "'int' object is not callable"), (":", "Empty module name"),
    ],
)  # fmt: skip
def test_a_reference_that_fails_is_told_with_its_line(spec, says, own_module, tmp_path):
    with pytest.raises(TargetError, match=says):
        of_callable(spec, tmp_path, IDS)


@pytest.mark.parametrize("tensors", [{}, {"0.input_ids": torch.tensor([1])}, {"0.out.a": torch.ones(1)}])
def test_a_file_without_activations_is_refused(tensors, tmp_path):
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(TargetError, match=r"a\.safetensors has no"):
        of_file(tmp_path / "a.safetensors")


def test_the_command(checkpoint, tmp_path, capsys):
    page = tmp_path / "parity.html"
    argv = ["parity", str(checkpoint), "--device", "cpu", "--adapter", str(CLEAN)]
    assert run([*argv, "--html", str(page), "--tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"all \d+ points agree", out)
    assert "model.layers.2 " in out
    assert page.read_text().count("<circle") == 3
    assert run([*argv, "--reference", "nothing"]) == 2
    assert run(["parity"]) == 2
    assert run(["parity", "--recorder"]) == 0
    assert capsys.readouterr().out == printed_recorder()


def test_a_difference_is_printed_and_drawn(checkpoint, tmp_path, capsys):
    package, page = plant(DEFECTS[2], tmp_path, "drawn"), tmp_path / "parity.html"
    assert run(["parity", str(checkpoint), "--device", "cpu", "--adapter", str(package), "--html", str(page)]) == 1
    out = capsys.readouterr().out
    assert "first difference: model.layers.0.self_attn.attn, position 1" in out
    assert "beyond the bound" in out
    assert "model.layers.0.self_attn.attn" in page.read_text()
    assert 'class="bad"' in page.read_text()


def test_bars_of_values_that_are_no_numbers():
    from mrv2.testing.parity import Point

    lines = bars(
        [Point(name="out.a.0", error=float("inf"), position=0), Point(name="in.a.1", error=0.0, position=-1)], 1e-3
    )
    assert lines[0].startswith("a.0 ")
    assert "beyond the bound" in lines[0]
    assert "#" not in lines[1]
