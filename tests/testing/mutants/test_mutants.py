"""Adapters with one defect each: the clean sample, and one small change. Each fails in the suite named for it.

Suites before that one pass, so that what a reader sees first is what is wrong.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mrv2.testing import Level, Outcome, Subject, run_checks
from mrv2.testing.suites import SUITES

CLEAN = Path(__file__).parent / "heron"
LEVELS = (Level.STATIC, Level.CPU)


@dataclass(frozen=True)
class Mutant:
    name: str
    suite: str
    file: str
    old: str
    new: str
    says: str  # in a failure: what is compared, or where
    cause: str = ""  # in the first failure, which a reader sees first: its first cause
    told: str = ""  # among the first two causes of the first failure


MODEL, STATE, HOOKS, TOML = "model.py", "state.py", "__init__.py", "adapter.toml"

MUTANTS = [
    # -- static
    Mutant(
        "a layer of another name", "static", MODEL,
        'self.o_proj = L.down("o_proj"', 'self.o_proj = L.down("out"',
        "layers.0.mixer.out is stored as layers.0.mixer.o_proj",
    ),
    Mutant("recurrent not said", "static", MODEL, "[bool] = True", "[bool] = False", "set recurrent = True"),
    Mutant("a window that isn't declared", "static", TOML, 'sliding_window = "both"\n', "", "sliding_window"),
    Mutant("states declared for one host only", "static", TOML, 'recurrent = "both"', 'recurrent = "native"', "recurrent"),
    Mutant(
        "a private module of the core", "static", STATE,
        "from torch import Tensor\n\nimport mrv2\n", "from torch import Tensor\n\nimport mrv2\nimport mrv2.runner.runner\n",
        "imports mrv2.runner.runner",
    ),
    Mutant(
        "an input that forward doesn't take", "static", MODEL,
        "ctx: StepContext, gain: Tensor)", "ctx: StepContext, gains: Tensor)", "doesn't take gain",
    ),
    Mutant(
        "a setting of the process", "static", HOOKS, "import mrv2\n",
        'import torch\n\nimport mrv2\n\ntorch.set_float32_matmul_precision("high")\n',
        "precision of float32 matmuls: highest, and then high",
    ),
    # -- weights
    Mutant(
        "hidden states of another dtype", "weights", MODEL, "lambda x: x * self.final_scale",
        "lambda x: x.bfloat16()", "of torch.bfloat16, expected a tensor",
    ),
    Mutant(
        "hidden states cut off", "weights", MODEL, "        return ctx.finish(self.norm, h, lambda x: x * self.final_scale)",
        "        return ctx.finish(self.norm, h)[:, 1:]", "expected a tensor",
    ),
    Mutant(
        "no number", "weights", MODEL, "lambda x: x * self.final_scale", "lambda x: x * (x - 10).sqrt()",
        "position 0: not a number",
    ),
    Mutant(
        "a seed in forward", "weights", MODEL, "        scale = self.embed_scale * (1",
        "        torch.manual_seed(20)\n        scale = self.embed_scale * (1", "and then 20",
    ),
    Mutant(
        "norms read as they are stored", "weights", MODEL,
        "            tensor = tensor + 1\n", "            pass\n", "norms: weights stored as an offset from one",
    ),
    Mutant(
        "a square matrix that isn't transposed", "weights", MODEL,
        "            tensor = tensor.T\n", "            pass\n", "the model after one token with the reference",
    ),
    Mutant("another activation", "weights", MODEL, 'act="silu"', 'act="gelu"', "another activation"),
    Mutant("tied head forgotten", "weights", MODEL, "tied_to=tied_to", "tied_to=None", "lm_head.weight"),
    Mutant(
        "a tensor that is ignored", "weights", MODEL, r'(r"^steps$",)', r'(r"^steps$", r"rate$")', "mixer.rate",
    ),
    Mutant(
        "a missing tensor made up", "weights", MODEL,
        "        yield name, tensor\n",
        '        yield name, tensor\n        if name == "layers.0.mixer.o_proj.weight":\n            made = True\n'
        '    if "made" not in locals():\n        yield "layers.0.mixer.o_proj.weight", torch.zeros(64, 64)\n',
        "blk.0.mixer.o_proj.weight: left out, and loaded without a word",
    ),
    Mutant(
        "weights of which nothing comes", "weights", MODEL,
        "self.decay * s + g[i] * v[i]", "0.6 * s + g[i] * v[i]", "tensor blk.1.mixer.rate: no position differs",
    ),
    Mutant(
        "derived from the first weights only", "weights", MODEL,
        "        self.decay.copy_(torch", "        if not self.decay.any():\n            self.decay.copy_(torch",
        "finalize_weights() keeps",
    ),
    Mutant(
        "the scale of the embeddings forgotten", "weights", MODEL,
        "scale = self.embed_scale * (1", "scale = (1", "a scale of embeddings",
    ),
    Mutant(
        "a residual left out", "weights", MODEL,
        "return Stream(self.o_proj(self.attn(q, k, v, ctx)), residual)",
        "return Stream(self.o_proj(self.attn(q, k, v, ctx)), torch.zeros_like(residual))", "a residual that is left out",
    ),
    # -- inputs
    Mutant(
        "a buffer that moves", "inputs", STATE,
        "return self.buffer[: view.num_tokens].copy_(torch.where(view.token_to_i >= 0, value, 0.0))",
        "return torch.where(view.token_to_i >= 0, value, 0.0)",
        "fill returns a new tensor",
    ),
    Mutant(
        "a dummy of its own", "inputs", STATE,
        "return self.buffer[:num_tokens].zero_()", "return torch.zeros(num_tokens)", "fill and fill_dummy use different",
    ),
    Mutant(
        "padding that is somebody's", "inputs", STATE,
        "copy_(torch.where(view.token_to_i >= 0, value, 0.0))", "copy_(value)", "a negative row or position",
    ),
    Mutant(
        "padding that is left as it was", "inputs", STATE,
        "        return self.buffer[: view.num_tokens].copy_(torch.where(view.token_to_i >= 0, value, 0.0))",
        "        out = self.buffer[: view.num_tokens]\n        return out.copy_(torch.where(view.token_to_i >= 0, value, out))",
        "leaves what an earlier step put behind them",
    ),
    Mutant(
        "an input that is never used", "inputs", MODEL,
        "self.embed_scale * (1 + gain[:, None])", "self.embed_scale * (1 + 0 * gain[:, None])",
        "tensor gain: no token differs",
    ),
    Mutant(
        "the place in the step for the position", "inputs", STATE,
        "(view.positions % 3 + 1)", "(torch.arange(view.num_tokens, device=row.device) % 3 + 1)", "view.positions",
    ),
    Mutant(
        "positions from one", "inputs", STATE,
        "(view.positions % 3 + 1)", "((view.positions + 1) % 3 + 1)", "an offset of one in positions",
    ),
    Mutant(
        "options that aren't checked", "inputs", STATE,
        "ConfigDict(strict=True)\n    gain: float = 0.0", "ConfigDict(strict=True)\n    gain: object = 0.0", "'loud'",
    ),
    # -- state
    Mutant(
        "the batch position for the row", "state", STATE,
        "row = view.rows[i].clamp(min=0).long()", "row = i", "indexed by its position in the batch",
    ),
    Mutant(
        "a row that keeps its former owner's value", "state", STATE,
        "        self.by_row.set(row,",
        '        if "gain" in request.sampling.extra_args:\n          self.by_row.set(row,',
        "leaves a field as it was",
    ),
    Mutant(
        "nothing set for a cached prefix", "state", STATE,
        "        self.by_row.set(row,", "        if request.num_computed_tokens == 0:\n          self.by_row.set(row,",
        "with a cached prefix",
    ),
    Mutant(
        "not set again after a preemption", "state", STATE,
        "        self.by_row.set(row,",
        "        self.seen = getattr(self, 'seen', set())\n        if request.req_id in self.seen:\n            return\n"
        "        self.seen.add(request.req_id)\n        self.by_row.set(row,",
        "a request that was there before",
    ),
    Mutant(
        "written before it is time", "state", STATE,
        "        self.by_row.set(row, Options.model_validate(request.sampling.extra_args).gain)",
        "        gain = Options.model_validate(request.sampling.extra_args).gain\n"
        "        self.by_row.set(row, gain)\n        self.by_row.device_tensor[row] = gain",
        "stage, and copy in flush",
    ),
    Mutant(
        "a state that isn't started anew", "state", MODEL,
        's = load_state(cache["s"], meta)', 's = cache["s"][meta.state_slots[:, 0].long()]',
        "reads the slot without load_state or fresh", "1. a cache or state was read where this request has written",
    ),
    Mutant(
        "a state multiplied by zero", "state", MODEL,
        's = load_state(cache["s"], meta)',
        's = cache["s"][meta.state_slots[:, 0].long()] * (meta.computed > 0)[:, None]', "it multiplies the state by zero",
        "never multiply by zero",
    ),
    Mutant(
        "a state by batch position", "state", MODEL,
        'class Block(nn.Module):',
        "import dataclasses\n\n_load, _store = load_state, store_state\n\n\ndef _at(meta):\n"
        "    slots = torch.arange(1, meta.num_reqs + 1, device=meta.seq_lens.device)[:, None]\n"
        "    return dataclasses.replace(meta, state_slots=slots)\n\n\ndef load_state(cache, meta):\n"
        "    return _load(cache, _at(meta))\n\n\ndef store_state(cache, meta, *rest, **state):\n"
        "    _store(cache, _at(meta), *rest, **state)\n\n\nclass Block(nn.Module):",
        "a kernel finds its state by position",
    ),
    Mutant(
        "a state stored a token early", "state", MODEL,
        "store_state(cache, meta, t, live, s=s)",
        "store_state(cache, meta, t, live, s=torch.where(live[:, None], (s - g[i] * v[i]) / self.decay, s))",
        "stored a token too early", "a state isn't the one after the step's last token",
    ),
    # -- attention
    Mutant("a forgotten window", "attention", MODEL, "{0: c.look_back, 2", "{0: None, 2", "a window", told="a window"),
    Mutant(
        "a window of one more", "attention", MODEL, "{0: c.look_back, 2", "{0: c.look_back + 1, 2", "a window",
        told="a window",
    ),
    Mutant(
        "another scale", "attention", MODEL, "scale=c.query_scale,", "scale=c.head_dim**-0.5,", "the scale of scores",
        told="the scale of scores",
    ),
    Mutant(
        "queries that are normalised", "attention", MODEL,
        "        q, k = self.rotary(", "        q = torch.nn.functional.rms_norm(q, (self.head_dim,))\n        q, k = self.rotary(",
        "norms of q and k", told="norms of queries and keys",
    ),
    Mutant(
        "rotated pairs in another layout", "attention", MODEL,
        "            tensor = tensor.unflatten(0, (-1, 16, 2)).transpose(1, 2).flatten(0, 2)\n", "            pass\n",
        "interleaved pairs or halves", told="rotation",
    ),
    Mutant(
        "another base of rotation", "attention", MODEL,
        '"rope_theta": c.rope_theta', '"rope_theta": 5e5', "whole prompts, alone, with the reference",
        told="rotation",
    ),
    Mutant(
        "half of each head rotated", "attention", MODEL,
        '"rope_theta": c.rope_theta', '"rope_theta": c.rope_theta, "partial_rotary_factor": 0.5',
        "which share of each head is rotated", told="rotation",
    ),
    Mutant(
        "a slot of -1 as an index", "attention", MODEL,
        '        write_tokens(cache["v"], meta, v)\n',
        '        slot = meta.slot_mapping\n        cache["v"][slot // meta.block_size, slot % meta.block_size] = v\n',
        "changed block", told="slot",
    ),
    Mutant(
        "a cache written past the end", "attention", MODEL,
        '        write_tokens(cache["v"], meta, v)\n',
        '        write_tokens(cache["v"], meta, v)\n        last = meta.slot_mapping.clamp(min=0) // meta.block_size + 1\n'
        '        cache["v"][last.clamp(max=len(cache["v"]) - 1), 0] = 0\n',
        "",
    ),
    Mutant(
        "entries past the length", "attention", MODEL,
        "            seen = place <= (meta.computed + t)[:, None]\n",
        "            seen = place <= (meta.seq_lens - 1)[:, None]\n", "", "1. a token sees what comes after it",
    ),
    Mutant(
        "padding left unwritten", "attention", MODEL,
        "        place = torch.arange(values.shape[1], device=v.device)\n        out.zero_()\n",
        "        place = torch.arange(values.shape[1], device=v.device)\n        out[: int(meta.query_start_loc[-1])] = 0\n",
        "belong to padding unwritten",
    ),
    # -- no-sync
    Mutant(
        "a length read on the host", "no-sync", STATE,
        "        value = self.by_row", "        assert int(view.seq_lens.max()) <= view.max_seq_len\n        value = self.by_row",
        "state.py:",
    ),
    Mutant(
        "a branch on the device's value", "no-sync", MODEL,
        "        out.zero_()\n        for t, (i, live) in enumerate(steps(meta)):\n            s = torch",
        "        out.zero_()\n        if bool((meta.seq_lens > 0).any()):\n            out.add_(0)\n"
        "        for t, (i, live) in enumerate(steps(meta)):\n            s = torch",
        "model.py:",
    ),
    Mutant(
        "a mask as an index", "no-sync", STATE,
        "        value = self.by_row", "        view.rows[view.rows >= 0].sum()\n        value = self.by_row", "state.py:",
    ),
    # -- graphs
    Mutant(
        "values from a Python list", "graphs", STATE,
        "        self.by_row.flush()\n",
        "        self.by_row.flush()\n        self.column, values = self.by_row, self.by_row.np.tolist()\n"
        "        rows = type('Rows', (), {'device_tensor': property(lambda _: torch.tensor(values))})()\n"
        "        rows.set, rows.np, rows.flush = self.column.set, self.column.np, self.column.flush\n"
        "        self.by_row = rows\n",
        "a tensor made from such values",
    ),
    Mutant(
        "declared, and not meant", "graphs", MODEL,
        'self.average)', 'self.average, capturable=False)', "cuda_graphs is declared, and the kernel of layers.1.mixer.all",
    ),
    # -- sampling
    Mutant(
        "a generator that all share", "sampling", STATE,
        '    """The parts are all there is."""\n',
        '    """The parts are all there is."""\n\n    def custom_sampler(self, default):\n'
        "        def draw(logits, rows, positions, needs):\n"
        "            noise = -torch.log(-torch.log(torch.rand_like(logits)))\n"
        "            return default(logits if needs.only_argmax else logits + noise, rows, positions, needs)\n\n"
        "        return draw\n",
        "draws from a shared generator",
    ),
    Mutant(
        "parameters by batch position", "sampling", STATE,
        '    """The parts are all there is."""\n',
        '    """The parts are all there is."""\n\n    def custom_sampler(self, default):\n'
        "        def draw(logits, rows, positions, needs):\n"
        "            return default(logits, torch.arange(len(rows), dtype=rows.dtype), positions, needs)\n\n"
        "        return draw\n",
        "reads parameters by batch position",
    ),
    # -- end to end
    Mutant(
        "a state outside of the caches", "end-to-end", MODEL,
        '        s = load_state(cache["s"], meta)\n',
        '        slots = meta.state_slots[:, 0].long()\n'
        '        own = self.__dict__.setdefault(f"own {cache[\'s\'].data_ptr()}", torch.zeros(4096, len(self.decay)))\n'
        '        s = torch.where((meta.computed > 0)[:, None], own[slots], 0)\n        cache = {"s": own}\n',
        "kept outside of the declared caches",
    ),
    # -- capabilities
    Mutant(
        "declared for nothing", "capabilities", TOML, 'pipeline_parallel = "vllm"', 'lora = "both"', "lora",
    ),
    Mutant(
        "graphs not declared", "capabilities", TOML, 'cuda_graphs = "native"\n', "", "cuda_graphs isn't declared",
    ),
    Mutant(
        "cached prefixes not declared", "capabilities", TOML,
        'prefix_caching = "both"\n', "", "prefix_caching isn't declared",
    ),
    # -- host parity
    Mutant(
        "code after the last layer", "host-parity", MODEL,
        "return ctx.finish(self.norm, h, lambda x: x * self.final_scale)",
        "return ctx.finish(self.norm, h) * self.final_scale",
        "code after ctx.finish",
    ),
    Mutant(
        "embeddings changed on every stage", "host-parity", MODEL,
        "        h = ctx.embed(self.embed, input_ids, lambda x: x * scale.to(x.dtype))\n",
        "        h = ctx.embed(self.embed, input_ids)\n        h = h._replace(x=h.x * scale.to(h.x.dtype))\n",
        "outside of ctx.embed",
    ),
    Mutant(
        "a loop of its own", "host-parity", MODEL,
        "        h = ctx.run(self.layers, h, positions)\n",
        "        for layer in self.layers:\n            h = layer(h, positions, ctx)\n",
        "instead of calling ctx.run",
    ),
    Mutant(
        "a method that only one host calls", "host-parity", STATE,
        '    """The parts are all there is."""\n',
        '    """The parts are all there is."""\n\n    def prepare_attn(self, view):\n'
        "        return dict(super().prepare_attn(view))\n",
        "overrides prepare_attn",
    ),
]  # fmt: skip


def plant(mutant: Mutant, folder: Path) -> Path:
    """The sample with this defect, as a package of its own name."""
    package = folder / f"heron_{MUTANTS.index(mutant)}"
    shutil.copytree(CLEAN, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"the sample has it {text.count(mutant.old)} times"
    file.write_text(text.replace(mutant.old, mutant.new))
    return package


def test_the_clean_sample_passes_everything():
    report = run_checks(Subject(str(CLEAN)), levels=LEVELS)
    assert not report.failures
    assert report.passes(LEVELS)
    kinds = {result.suite for result in report.results if result.outcome is Outcome.PASSED}
    assert kinds == {suite.replace("_", "-") for suite in SUITES}
    missing = {r.message for r in report.results if r.outcome is Outcome.NOT_APPLICABLE}
    assert all(m.startswith("adapter.toml says") for m in missing), missing


@pytest.fixture(autouse=True)
def _settings():
    before, seed = torch.get_float32_matmul_precision(), torch.initial_seed()
    yield
    torch.set_float32_matmul_precision(before)
    torch.manual_seed(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.suite}: {m.name}")
def test_a_mutant_fails_in_its_suite(mutant, tmp_path):
    suites = [suite.replace("_", "-") for suite in SUITES]
    wanted = suites[: suites.index(mutant.suite) + 1]
    report = run_checks(Subject(str(plant(mutant, tmp_path))), levels=LEVELS, suites=wanted)
    assert report.failures, "the defect goes unnoticed"
    first = report.failures[0]
    assert first.suite == mutant.suite, f"{first.label}: {first.message}"
    assert any(mutant.says in r.message for r in report.failures), "\n".join(r.message for r in report.failures)
    assert mutant.cause in first.message
    likeliest = [line for line in first.message.splitlines() if line.startswith(("  1. ", "  2. "))]
    assert mutant.told in "\n".join(likeliest), first.message
