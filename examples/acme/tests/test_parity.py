"""`mrv2 parity` beside what training recorded, and the recording beside the training code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mrv2.testing import recorded_reference
from safetensors.torch import load_file

from mrv2_adapter_acme.testing import CHECKPOINT, RECORDED

PACKAGE = CHECKPOINT.parent
TRAINING = PACKAGE.parents[1] / "training"
NAMES = RECORDED.parent / "names.json"


def mrv2(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line."""
    command = [sys.executable, "-m", "mrv2", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def parity(adapter: Path) -> subprocess.CompletedProcess[str]:
    """As the README says it."""
    options = ("--reference", RECORDED, "--names", NAMES, "--device", "cpu", "--json")
    return mrv2("parity", CHECKPOINT, "--adapter", adapter, *options)


def test_all_modules_agree_with_the_recorded_ones() -> None:
    """Layers, mixers, MLPs and norms of all kinds; what is interleaved has no counterpart."""
    done = parity(PACKAGE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    points = {point["point"] for point in found["points"]}
    assert found["first"] is None
    for layer in range(3):
        name = f"model.layers.{layer}"
        assert {f"out.{name}", f"out.{name}.mixer", f"out.{name}.mlp", f"out.{name}.mixer.norm"} <= points
    assert {"out.model.embed_tokens", "out.model.norm"} <= points
    left = {name.rpartition(".")[2] for name in found["unmatched"]}
    assert left == {"qkv", "keep_rate", "gate_up"}


@pytest.mark.parametrize(
    ("file", "old", "new", "first"),
    [
        ("weights.py", "tensor[:, -2]), (\"v\", tensor[:, -1])", "tensor[:, -1]), (\"v\", tensor[:, -2])", "0.mixer"),
        ("weights.py", "1 + tensor.float()", "tensor", "0.mixer.norm"),
        ("mixers.py", "+ self.decay.float()", "", "0.mixer"),
    ],
    ids=["key and value swapped", "gains as they are", "no decay"],
)  # fmt: skip
def test_a_mistake_is_found_where_it_is(file: str, old: str, new: str, first: str, tmp_path: Path) -> None:
    """The control: the recording tells them apart."""
    for module in (*PACKAGE.glob("*.py"), PACKAGE / "adapter.toml"):
        (tmp_path / "wrong").mkdir(exist_ok=True)
        (tmp_path / "wrong" / module.name).write_text(module.read_text())
    text = (PACKAGE / file).read_text()
    assert old in text
    (tmp_path / "wrong" / file).write_text(text.replace(old, new))
    done = parity(tmp_path / "wrong")
    assert done.returncode == 1, done.stderr
    assert f"model.layers.{first}" in json.loads(done.stdout)["first"]["point"]


@pytest.mark.skipif(not TRAINING.exists(), reason="the training code isn't here")
def test_the_training_code_still_records_the_same(tmp_path: Path) -> None:
    """It runs without mrv2, and with the one file that it was given."""
    (tmp_path / "record_activations.py").write_text(mrv2("parity", "--recorder").stdout)
    arguments = [str(CHECKPOINT), "again.safetensors"]
    script = (
        "import runpy, sys; sys.modules['mrv2'] = None; "
        f"sys.path[:0] = [{str(TRAINING)!r}, {str(tmp_path)!r}]; sys.argv[1:] = {arguments!r}; "
        f"runpy.run_path({str(TRAINING / 'record.py')!r}, run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=200)
    again, kept = load_file(tmp_path / "again.safetensors"), load_file(RECORDED)
    assert again.keys() == kept.keys()
    for name, tensor in kept.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-4)


def test_what_is_recorded_is_all_that_is_known() -> None:
    """Logits of three sequences; of another there is no answer."""
    answer = recorded_reference(RECORDED)(CHECKPOINT)
    assert [len(ids) for ids in answer.recorded] == [8, 44, 30]
    assert answer.logprobs([5, 4, 3], {}) is None
