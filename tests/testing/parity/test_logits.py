"""References whose head is no module, and those that give logits alone: the end is compared, whatever makes it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel

import mrv2_adapter_llama
from mrv2.cli.app import run
from mrv2.errors import TargetError
from mrv2.frontend.build import load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.testing import recorded_reference, tiny_config
from mrv2.testing.activations import Activations, of_callable, of_file, of_module, of_transformers
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.parity import compare_modules, to_dict
from mrv2.testing.recorders.record_activations import Recorder

LLAMA = str(Path(mrv2_adapter_llama.__file__).parent)
IDS = [3, 17, 44, 2, 9, 60, 31, 8, 25, 13, 55, 1]


class Tied(nn.Module):
    """A decoder; its head is the embedding's weight, and code after it."""

    def __init__(self, folder, cap=2.0, scale=1.0, wrap=lambda logits: logits):
        super().__init__()
        self.model = AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        self.cap, self.scale, self.wrap = cap, scale, wrap

    def forward(self, ids):
        hidden = self.model(ids, use_cache=False).last_hidden_state
        logits = hidden @ self.model.embed_tokens.weight.T * self.scale
        return self.wrap(self.cap * torch.tanh(logits / self.cap) if self.cap else logits)


class HeadThenCap(Tied):
    """The head is a module, the cap is not."""

    def __init__(self, folder):
        super().__init__(folder)
        vocab, hidden = self.model.embed_tokens.weight.shape
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        logits = self.lm_head(self.model(ids, use_cache=False).last_hidden_state)
        return self.cap * torch.tanh(logits / self.cap)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("LlamaConfig", tie_word_embeddings=True)
    return make_checkpoint(tmp_path_factory.mktemp("tied"), config, seed=5)


@pytest.fixture
def ours(checkpoint):
    """ours(soft_cap, scale) -> the model with that head."""

    def make(soft_cap=None, scale=1.0):
        loaded = load(str(checkpoint), EngineConfig(device="cpu", dtype="float32"), [LLAMA])
        loaded.module.lm_head.soft_cap, loaded.module.lm_head.scale = soft_cap, scale
        return loaded

    return make


def compare(loaded, module):
    return compare_modules(loaded, of_module(module.eval(), IDS, "own"), device="cpu")


@pytest.mark.parametrize("kind", [Tied, HeadThenCap])
def test_a_soft_cap_in_code_after_the_head_is_compared(kind, checkpoint, ours):
    right = compare(ours(soft_cap=2.0), kind(checkpoint))
    assert right.first is None, right.first
    assert right.points[-1].name == "logits"
    assert len(right.points) > 20
    assert right.uncompared == {}
    dropped = compare(ours(), kind(checkpoint))
    assert dropped.first.name == "logits"
    assert dropped.first.label == "logits"
    assert dropped.causes[0].startswith("a soft cap")


def test_a_scale_after_the_head_is_compared(checkpoint, ours):
    assert compare(ours(scale=0.25), Tied(checkpoint, cap=None, scale=0.25)).first is None
    dropped = compare(ours(), Tied(checkpoint, cap=None, scale=0.25))
    assert dropped.first.name == "logits"
    assert dropped.causes[0] == "a constant factor: ours is 4 times the reference's"


@pytest.mark.parametrize(
    "wrap",
    [lambda t: {"loss": None, "logits": t}, lambda t: (t, None), lambda t: (torch.tensor(1.0), t), lambda t: t[:, -1:]],
    ids=["by name", "first of a tuple", "after a loss", "of the last token"],
)
def test_logits_are_found_in_what_a_model_returns(wrap, checkpoint, ours):
    module = Tied(checkpoint, wrap=wrap)
    assert compare(ours(soft_cap=2.0), module).first is None
    dropped = compare(ours(), module)
    assert dropped.first.name == "logits"
    assert dropped.first.position in range(len(IDS))


def test_a_difference_of_the_last_token_is_at_its_position(checkpoint, ours):
    assert compare(ours(), Tied(checkpoint, wrap=lambda t: t[:, -1:])).first.position == len(IDS) - 1


def test_a_dump_keeps_logits(checkpoint, ours, tmp_path):
    module = Tied(checkpoint).eval()
    with torch.no_grad(), Recorder(module) as recorder:
        logits = module(torch.tensor([IDS]))
    recorder.save(tmp_path / "dump.safetensors", torch.tensor(IDS), logits)
    recorder.save(tmp_path / "without.safetensors", torch.tensor(IDS))
    dump = of_file(tmp_path / "dump.safetensors")
    assert compare_modules(ours(soft_cap=2.0), dump, device="cpu").first is None
    assert compare_modules(ours(), dump, device="cpu").first.name == "logits"
    without = compare_modules(ours(), of_file(tmp_path / "without.safetensors"), device="cpu")
    assert without.first is None
    assert to_dict(without)["not_compared"] == {"logits": "the reference gives none"}
    only = {n: t for n, t in load_file(tmp_path / "dump.safetensors").items() if n in ("0.input_ids", "0.logits")}
    save_file(only, tmp_path / "only.safetensors")
    alone = compare_modules(ours(soft_cap=2.0), of_file(tmp_path / "only.safetensors"), device="cpu")
    assert [p.name for p in alone.points] == ["logits"]


def test_of_several_recorded_sequences_one_with_activations_is_taken(tmp_path):
    tensors = {f"{i}.input_ids": torch.tensor([i]) for i in range(3)}
    save_file(tensors | {"0.logits": torch.ones(1, 4), "1.out.a": torch.ones(1, 4)}, tmp_path / "a.safetensors")
    found = of_file(tmp_path / "a.safetensors")
    assert (found.ids, list(found.tensors), found.logits) == ([1], ["out.a"], None)


def test_transformers_logits_are_the_last_point(checkpoint, ours):
    answer = of_transformers(checkpoint, IDS, torch.float32)
    assert compare_modules(ours(), answer, device="cpu").points[-1].name == "logits"
    assert compare_modules(ours(scale=1.01), answer, device="cpu").first is not None


def test_hidden_states_are_not_taken_for_logits(checkpoint, ours):
    class Headless(Tied):
        def forward(self, ids):
            return self.model(ids, use_cache=False).last_hidden_state

    found = compare(ours(), Headless(checkpoint))
    assert found.first is None
    assert found.misshapen == ()
    assert re.fullmatch(r"\[1, 12, 64\] of the reference, \[12, \d+\] of ours", found.uncompared["logits"])


def test_named_logits_of_another_shape_are_a_difference(checkpoint, ours):
    found = compare(ours(soft_cap=2.0), Tied(checkpoint, wrap=lambda t: {"logits": t[..., :-1]}))
    assert found.misshapen[0].startswith("logits (")


def test_a_module_whose_names_are_all_others_is_compared_in_its_logits(checkpoint, ours):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapped = Tied(checkpoint)

        def forward(self, ids):
            return self.wrapped(ids)

    found = compare(ours(soft_cap=2.0), Outer())
    assert [p.name for p in found.points] == ["logits"]
    assert "none of the reference's has a name of ours" in found.uncompared["modules"]
    nameless = Activations(name="own", ids=IDS, tensors={"out.wrapped": torch.ones(12, 3)})
    with pytest.raises(TargetError, match="none of the reference's has a name of ours: it has out"):
        compare_modules(ours(), nameless, device="cpu")


# -- functions of token ids ----------------------------------------------------------------------------------------

OWN = """
import os
from pathlib import Path

import torch
from mrv2.testing import transformers_reference
from transformers import AutoModelForCausalLM

class Reference:
    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(Path(folder))

    def __call__(self, ids):
        assert isinstance(ids, list) and not torch.is_grad_enabled()
        return self.model(torch.tensor([ids])).logits[0]

def batched(folder): return lambda ids: Reference(folder)(ids)[None]
def arrays(folder): return lambda ids: Reference(folder)(ids).numpy()
def output(folder): return lambda ids: Reference(folder).model(torch.tensor([ids]))
def with_options(folder): return lambda ids, options: Reference(folder)(ids) if options == {} else None
def by_name(folder): return lambda ids: {"logits": Reference(folder)(ids)}
def plain(ids): return Reference(os.environ["OWN_FOLDER"])(ids)
answer = transformers_reference()

def wrong(folder): return lambda ids: Reference(folder)(ids).roll(1, -1)
def text(folder): return lambda ids: "logits"
def short(folder): return lambda ids: Reference(folder)(ids)[1:]
"""


@pytest.fixture
def own(tmp_path, checkpoint, monkeypatch):
    (tmp_path / "own_logits.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN_FOLDER", str(checkpoint))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    sys.modules.pop("own_logits", None)


@pytest.mark.parametrize(
    "name", ["Reference", "batched", "arrays", "output", "with_options", "by_name", "plain", "answer"]
)
def test_a_function_of_ids_is_a_reference_of_logits(name, own, checkpoint, ours):
    found = compare_modules(ours(), of_callable(f"own_logits:{name}", checkpoint, IDS), device="cpu")
    assert [p.name for p in found.points] == ["logits"]
    assert found.first is None
    assert found.uncompared == {"modules": "the reference has none"}


def test_a_recorded_answer_is_asked_for_its_own_sequence(checkpoint, own, tmp_path, monkeypatch):
    logits = np.zeros((3, 5), "float32")
    np.savez(tmp_path / "r.npz", **{"a.input_ids": np.array([4, 2, 1]), "a.logits": logits})
    module = type(sys)("own_recorded")
    module.answer = recorded_reference(tmp_path / "r.npz")
    monkeypatch.setitem(sys.modules, "own_recorded", module)
    found = of_callable("own_recorded:answer", checkpoint, IDS)
    assert (found.ids, found.logits.shape) == ([4, 2, 1], (3, 5))


@pytest.mark.parametrize(
    ("name", "says"), [("text", "gave a str, neither logits"), ("short", r"\[11, \d+\] of the ref")]
)
def test_what_is_neither_is_told(name, says, own, checkpoint, ours):
    with pytest.raises(TargetError, match=says):
        compare_modules(ours(), of_callable(f"own_logits:{name}", checkpoint, IDS), device="cpu")


def test_the_command_says_what_was_not_compared(own, checkpoint, tmp_path, capsys):
    argv = ["parity", str(checkpoint), "--device", "cpu", "--adapter", LLAMA, "--reference"]
    assert run([*argv, "own_logits:Reference", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "the only point, logits, agrees" in out
    assert "modules weren't compared" in out
    assert "Modules weren" in (tmp_path / "page.html").read_text()
    assert run([*argv, "own_logits:wrong"]) == 1
    out = capsys.readouterr().out
    assert "first difference: logits, position 0" in out
    assert "anything in the model: modules weren't compared" in out
    assert run([*argv, "own_logits:Reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_compared"] == {"modules": "the reference has none"}


def test_what_transformers_says_is_cut(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(TargetError, match="transformers can't load") as failed:
        of_transformers(tmp_path, IDS, torch.float32)
    assert len(failed.value.what) < 250 + len(str(tmp_path))
    assert "\n" not in failed.value.what
    assert "function of token ids" in failed.value.fix


def test_the_scaffolds_reference_is_one(checkpoint, tmp_path):
    command = [sys.executable, "-m", "mrv2"]
    made = subprocess.run(
        [*command, "new-adapter", "acme", "--kind", "decoder"], cwd=tmp_path, timeout=100, check=False
    )
    assert made.returncode == 0
    project = tmp_path / "mrv2-adapter-acme"
    write = (
        "import sys; sys.path.insert(0, 'src'); from pathlib import Path; from mrv2_adapter_acme import testing as t; "
        "t.write_checkpoint(Path('tiny'), t.tiny()); from mrv2.cli.app import run; sys.exit(run(["
        "'parity', 'tiny', '--device', 'cpu', '--adapter', '.', '--reference', 'mrv2_adapter_acme.testing:Reference']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", write], cwd=project, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "the only point, logits, agrees" in done.stdout
