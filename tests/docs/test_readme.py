"""What the README shows is what the project does."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from mrv2 import LLM, SamplingParams
from mrv2.testing.naive import NaiveGreedy

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HELLO = ROOT / "examples" / "hello.py"
WIDTH, DEPTH, HEADS, VOCAB = 32, 2, 4, 256


def block(language, containing, page=README):
    """The fenced block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return next(b for b in blocks if containing in b)


def python(module, *words, cwd=None):
    """Run a module as a program."""
    command = [sys.executable, "-m", module, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint in the private team's own names, and its tensors."""
    g = torch.Generator().manual_seed(0)
    d, hd = WIDTH, WIDTH // HEADS
    shapes = {"embed.weight": (VOCAB, d), "lm_head.weight": (VOCAB, d), "norm.weight": (d,)}
    for i in range(DEPTH):
        shapes |= {
            f"layers.{i}.attn.norm.weight": (d,),
            f"layers.{i}.attn.q_proj.weight": (d, d),
            f"layers.{i}.attn.k_proj.weight": (hd, d),
            f"layers.{i}.attn.v_proj.weight": (hd, d),
            f"layers.{i}.attn.o_proj.weight": (d, d),
            f"layers.{i}.mlp.norm.weight": (d,),
            f"layers.{i}.mlp.gate_proj.weight": (4 * d, d),
            f"layers.{i}.mlp.up_proj.weight": (4 * d, d),
            f"layers.{i}.mlp.down_proj.weight": (d, 4 * d),
        }
    tensors = {n: torch.randn(s, generator=g) * s[-1] ** -0.5 + (len(s) == 1) for n, s in shapes.items()}
    folder = tmp_path_factory.mktemp("hello")
    save_file({f"transformer.{n}": t for n, t in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["HelloForCausalLM"],
        "model_type": "hello",
        "width": WIDTH,
        "depth": DEPTH,
        "heads": HEADS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


def naive_logits(w, ids, *, parallel=False):
    """The same model, written down plainly; `parallel`: attention and MLP side by side, behind attention's norm."""

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def rotate(x):  # [T, heads, hd]
        half = x.shape[-1] // 2
        angle = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(half) / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    n, hd = len(ids), WIDTH // HEADS
    h = w["embed.weight"][list(ids)]
    for i in range(DEPTH):
        p = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        x = norm(h, p["attn.norm.weight"])
        q = rotate((x @ p["attn.q_proj.weight"].T).view(n, HEADS, hd))
        k = rotate((x @ p["attn.k_proj.weight"].T).view(n, 1, hd)).expand(-1, HEADS, -1)
        v = (x @ p["attn.v_proj.weight"].T).view(n, 1, hd).expand(-1, HEADS, -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(hd)
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, WIDTH)
        h = h + out @ p["attn.o_proj.weight"].T
        x = x if parallel else norm(h, p["mlp.norm.weight"])
        gated = F.silu(x @ p["mlp.gate_proj.weight"].T) * (x @ p["mlp.up_proj.weight"].T)
        h = h + gated @ p["mlp.down_proj.weight"].T
    return norm(h[-1], w["norm.weight"]) @ w["lm_head.weight"].T


def test_the_readme_shows_the_example_as_it_is():
    assert block("python", "HelloForCausalLM") == HELLO.read_text()


def test_the_example_equals_the_same_model_written_plainly(checkpoint):
    folder, tensors = checkpoint
    oracle = NaiveGreedy(lambda ids: naive_logits(tensors, ids))
    prompts = [[1, 2, 3], list(range(40)), [7], [9] * 17]
    with LLM(str(folder), adapters=[str(HELLO)], block_size=4, max_chunk=7) as llm:
        out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        again = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    want = [oracle(p, 12) for p in prompts]
    assert [list(r.outputs[0].token_ids) for r in out] == want
    assert [list(r.outputs[0].token_ids) for r in again] == want
    assert again[1].usage.cached_tokens == 36


def test_the_tutorials_layer_of_ones_own_equals_it_written_plainly(checkpoint, tmp_path):
    """The block of docs/first-adapter.md, in the place of the example's."""
    own = block("python", "class Block", (ROOT / "docs" / "first-adapter.md").read_text())
    source = re.sub(r"class Block\(.*?\n\n\n", lambda _: own + "\n\n", HELLO.read_text(), flags=re.DOTALL)
    (tmp_path / "parallel.py").write_text(source)
    _, tensors = checkpoint
    places = {"attn.norm": "norm", "mlp.down_proj": "down", "attn.o_proj": "o_proj"}
    places |= {f"attn.{x}_proj": f"{x}_proj" for x in "qkv"} | {f"mlp.{x}_proj": x for x in ("gate", "up")}
    renamed = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"(layers\.\d+)\.(.*)\.weight", name)
        if layer is None:
            renamed[name] = tensor
        elif layer[2] in places:
            renamed[f"{layer[1]}.{places[layer[2]]}.weight"] = tensor
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors")
    shutil.copy(checkpoint[0] / "config.json", folder)
    oracle = NaiveGreedy(lambda ids: naive_logits(tensors, ids, parallel=True))
    prompts = [[1, 2, 3], list(range(40)), [7]]
    with LLM(str(folder), adapters=[str(tmp_path / "parallel.py")], block_size=4, max_chunk=7) as llm:
        out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    assert [list(r.outputs[0].token_ids) for r in out] == [oracle(p, 12) for p in prompts]


def test_the_example_runs_with_a_config_alone(tmp_path):
    """The README's last two lines of that block, with fewer requests."""
    shown = block("console", "my-checkpoint").splitlines()
    config = next(re.search(r"'(\{.*\})' > config.json", line) for line in shown if "config.json" in line)
    (tmp_path / "config.json").write_text(config[1])
    words = next(line for line in shown if "mrv2 bench" in line).partition("#")[0].split()[2:]
    shutil.copy(HELLO, tmp_path)
    options = ["--repeat", "1", "--new-tokens", "4", "--steps", "2", "--requests", "2", "--html", "bench.html"]
    done = python("mrv2", *words, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "bench.html").read_text()
    assert "64 tokens in, 4 out" in page
    assert "adapter=hello local" in page


def test_the_example_runs_from_the_command_line(checkpoint):
    folder, _ = checkpoint
    source = folder / "in.jsonl"
    source.write_text('{"prompt": [1, 2, 3], "max_tokens": 2}\n')
    done = python("mrv2", "generate", folder, "--adapter", HELLO, "--json", "-i", source)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["outputs"][0]["token_ids"]) == 2


def test_the_readme_shows_what_list_prints():
    done = subprocess.run(
        [sys.executable, "-m", "mrv2", "list"], capture_output=True, text=True, timeout=60, check=True
    )
    shown = [plain(line) for line in block("console", "$ mrv2 list").splitlines()]
    for line in done.stdout.splitlines():
        assert plain(line) in shown


def test_the_readmes_test_class_proves_the_readmes_adapter(tmp_path):
    shutil.copy(HELLO, tmp_path)
    (tmp_path / "test_hello.py").write_text(block("python", "class TestHello"))
    options = ["-q", "-p", "no:cacheprovider", "-p", "mrv2.testing.plugin", "--mrv2-levels", "L0,L1"]
    done = python("pytest", *options, "--mrv2-require", "L1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert re.search(r"L1 CPU +passed +\d+ passed \(without a reference", done.stdout)


def plain(line):
    """Without what depends on where the adapters were last checked, and when."""
    return re.sub(r" +", " ", re.sub(r" (L[0-3]( L[0-3])*|stale|-) +(?=ok$)", " ", line))


def test_ci_runs_the_readmes_test_command():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    (command,) = (line for line in lines if line.startswith("make "))
    assert command == lines[-1] == "make test test-vllm"
    assert f"\n{command} " in block("bash", command)


def test_every_module_of_the_core_has_its_line_in_the_structure_page():
    page = (ROOT / "docs" / "structure.md").read_text()
    core = ROOT / "core" / "mrv2"
    modules = {str(f.relative_to(core)) for f in core.rglob("*.py") if f.name not in ("__init__.py", "__main__.py")}
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.MULTILINE))
    assert modules - listed == set(), "modules without a line"
    assert listed - modules == set(), "lines without a module"
