"""The kit itself: classes, overrides, levels, references, and what a run is reported as."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from mrv2.errors import OverrideError, TargetError
from mrv2.testing import (
    AdapterConformance,
    Level,
    Subject,
    Target,
    override,
    recorded_reference,
    run_checks,
    tiny_config,
)

HERON = Path(__file__).parent / "mutants" / "heron"
pytest_plugins = ["pytester"]


# -- the class ---------------------------------------------------------------------------------------------------

CLASS = """
from mrv2.testing import AdapterConformance

class TestHeron(AdapterConformance):
    adapter = {path!r}
"""
PYTEST = ("--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-p", "mrv2.testing.plugin")
OPTIONS = (*PYTEST, "-k", "static or logits or vllm")


def test_a_class_of_two_lines_runs_every_check(pytester):
    pytester.makepyfile(test_heron=CLASS.format(path=str(HERON)))
    done = pytester.runpytest_subprocess(*OPTIONS)
    text = done.stdout.str()
    assert done.ret == 0, text
    assert "TestHeron" in text
    assert "L0 static  passed      5 passed" in text
    assert "L1 CPU     passed      1 passed" in text
    if not torch.cuda.is_available():
        assert "L2 GPU     not run     1 not run (there is no GPU here)" in text


def test_a_required_level_that_is_not_run_fails(pytester):
    pytester.makepyfile(test_heron=CLASS.format(path=str(HERON)))
    for level, code in (("L1", 0), ("L2", 1)):
        levels = ("--mrv2-levels", "L0,L1")
        done = pytester.runpytest_subprocess(*OPTIONS, *levels, "--mrv2-require", level)
        assert done.ret == code
        assert "L2 GPU     not run     1 not run (level L2 isn't asked for)" in done.stdout.str()


@pytest.mark.parametrize("levels", ["l0", "L0,L9", ""])
def test_levels_that_are_none_are_refused(levels, pytester):
    pytester.makepyfile(CLASS.format(path=str(HERON)))
    done = pytester.runpytest_subprocess(*OPTIONS, "--mrv2-levels", levels)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*is none of L0, L1, L2, L3*"])


def test_an_override_needs_a_reason(pytester):
    source = CLASS.format(path=str(HERON)) + "    def test_sampling_logits(self):\n        pass\n"
    pytester.makepyfile(test_heron=source)
    done = pytester.runpytest_subprocess(*OPTIONS)
    assert done.ret == 2  # nothing is collected
    assert "MRV2-702" in done.stdout.str()
    assert "TestHeron replaces the standard test test_sampling_logits" in done.stdout.str()


def test_an_override_with_a_reason_is_shown_and_not_counted_as_passed(pytester):
    source = CLASS.format(path=str(HERON)).replace("import AdapterConformance", "import AdapterConformance, override")
    source += "    @override('the head is padded to 64')\n    def test_sampling_logits(self):\n        pass\n"
    pytester.makepyfile(test_heron=source)
    done = pytester.runpytest_subprocess(*OPTIONS)
    assert done.ret == 0, done.stdout.str()
    assert "1 overridden" in done.stdout.str()
    assert "overridden: test_sampling_logits: the head is padded to 64" in done.stdout.str()


def test_tests_may_not_be_taken_out_either():
    with pytest.raises(OverrideError, match="takes out the standard test test_weights_loads"):
        type("TestNone", (AdapterConformance,), {"test_weights_loads": None})
    with pytest.raises(OverrideError, match="is no reason"):
        override("no")


def test_a_failure_reads_as_a_finding(pytester, heron):
    folder = heron("heron_scaled", model=[("scale=c.query_scale", "scale=c.head_dim**-0.5")])
    pytester.makepyfile(test_heron=CLASS.format(path=str(folder)))
    done = pytester.runpytest_subprocess(*PYTEST, "-k", "attention_answer")
    text = done.stdout.str()
    assert done.ret == 1
    assert "compared: whole prompts, alone, with the reference (Reference)" in text
    assert "first difference: request 1 (5 tokens), position 1: log-probabilities differ by" in text
    assert "2. the scale of scores, a soft cap, or norms of queries and keys" in text
    assert "Traceback" not in text


def test_the_plugin_imports_no_torch(tmp_path):
    (tmp_path / "test_other.py").write_text("def test_it(): pass\n")
    code = (
        f"import sys, pytest; assert pytest.main({[*PYTEST, str(tmp_path)]!r}) == 0;"
        "assert 'mrv2.testing.plugin' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tmp_path)


# -- targets and references ----------------------------------------------------------------------------------------


def test_without_a_config_nothing_passes_but_what_is_static(heron):
    folder = heron("heron_bare", init=[("    return target()", "    return None")])
    report = run_checks(Subject(str(folder)), suites=["static", "weights"])
    assert [s.state for s in report.levels][:2] == ["incomplete", "not run"]
    assert not report.passes([Level.STATIC])
    assert {r.message for r in report.results if r.level is Level.CPU} == {
        "there is no config to test with (mrv2_test_target)"
    }


def test_without_a_reference_invariances_carry_the_proof(heron):
    folder = heron("heron_alone", reference=[("reference=Reference,", "reference=None,")])
    report = run_checks(Subject(str(folder)), levels=[Level.CPU], suites=["weights", "attention"])
    assert not report.failures
    level = report.levels[1]
    assert level.passed
    assert "without a reference: invariances carry the proof" in str(level)
    assert report.reference == "none"


def test_a_recorded_reference(tmp_path, heron):
    from safetensors.torch import save_file

    subject = Subject(str(HERON))
    case = subject.case("heron", Level.CPU)
    ids = case.prompts((40,), seed=1)[0]
    logprobs = case.answer.logprobs(ids, {})
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({"a.input_ids": torch.tensor(ids), "a.logits": logprobs}, good)
    save_file(
        {"a.input_ids": torch.tensor(ids), "a.logits": logprobs + torch.arange(40)[:, None] * 0.001 * logprobs}, bad
    )
    for file, failing in ((good, set()), (bad, {"attention"})):
        target = Target(reference=recorded_reference(file), checkpoint=case.folder, configs={})
        one = Subject(str(heron(f"heron_{file.stem}", reference=[('configs={"heron": HeronConfig()},', "")])), target)
        report = run_checks(one, levels=[Level.CPU], suites=["attention", "end-to-end"])
        assert {r.suite for r in report.failures} == failing, report.failures
        assert report.reference == "recorded"


@pytest.mark.parametrize("content", [None, b"no such thing", {"a.input_ids": [1, 2]}])
def test_recordings_that_are_none(tmp_path, content):
    import numpy as np

    file = tmp_path / "dump.npz"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        np.savez(file, **{k: np.array(v) for k, v in content.items()})
    with pytest.raises(TargetError):
        recorded_reference(file)(tmp_path)


class PrivateConfig(PretrainedConfig):
    model_type = "private"

    def __init__(self, hidden_size=8, depth=1, **kwargs):
        self.hidden_size, self.depth = hidden_size, depth
        super().__init__(**kwargs)


def test_tiny_configs():
    config = tiny_config("Qwen3Config", num_hidden_layers=3)
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (64, 3, 32)
    config = tiny_config("Qwen2Config")  # knows no head_dim
    assert config.hidden_size // config.num_attention_heads == 32
    assert tiny_config(PrivateConfig, depth=4).depth == 4


def test_a_config_that_serves_too_little(heron):
    folder = heron("heron_short", reference=[("HeronConfig()}", "HeronConfig(max_position_embeddings=32)}")])
    report = run_checks(Subject(str(folder)), levels=[Level.STATIC])
    assert "serves 32 tokens; the suites need 64" in report.failures[0].message
