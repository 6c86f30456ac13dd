"""The conformance kit's level L3: the clean sample passes it, and an adapter that suits one host only does not."""

from pathlib import Path

import pytest

from mrv2.testing import Level, Outcome, Subject, run_checks
from mrv2.testing.check import jobs, run_job

pytestmark = pytest.mark.timeout(900)

HERON = Path(__file__).parents[1] / "testing" / "mutants" / "heron"
ACME = Path(__file__).parents[2] / "examples" / "acme"
slow = pytest.mark.slow


def run(subject, name):
    (job,) = [j for j in jobs(subject, [Level.VLLM], ["host-parity"]) if j.check.name == name]
    return run_job(subject, job)


@pytest.mark.parametrize("name", ["in_vllm", pytest.param("in_vllm_in_two_stages", marks=slow)])
def test_the_clean_sample_passes_inside_vllm(name):
    result = run(Subject(str(HERON)), name)
    assert result.outcome is Outcome.PASSED, result.message


@pytest.mark.parametrize("config", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe"])
def test_our_adapters_pass_inside_vllm(config):
    """The other checks of the level, ranks and stages among them, have files of their own here for these adapters."""
    subject = Subject("qwen" if config.startswith("qwen") else "llama")
    (job,) = [
        j for j in jobs(subject, [Level.VLLM], ["host-parity"]) if (j.check.name, j.config) == ("in_vllm", config)
    ]
    result = run_job(subject, job)
    assert result.outcome is Outcome.PASSED, result.message


@pytest.mark.parametrize(
    "name",
    [
        "in_vllm",
        pytest.param("in_vllm_in_chunks", marks=slow),
        pytest.param("in_vllm_on_two_ranks", marks=slow),
        pytest.param("in_vllm_in_two_stages", marks=slow),
    ],
)
def test_a_package_whose_reference_is_recorded_passes_inside_vllm(name):
    result = run(Subject(str(ACME)), name)
    assert result.outcome is Outcome.PASSED, result.message


def test_what_vllm_refuses_is_reported_with_our_message(tmp_path):
    import shutil

    folder = tmp_path / "heron_unwindowed"
    shutil.copytree(HERON, folder, ignore=shutil.ignore_patterns("__pycache__"))
    toml = folder / "adapter.toml"
    toml.write_text(toml.read_text().replace('sliding_window = "both"', 'sliding_window = "native"'))
    result = run(Subject(str(folder)), "in_vllm")
    assert result.outcome is Outcome.FAILED
    assert "sliding_window" in result.message
    assert "MRV2-403" in result.message


def test_a_transform_that_asks_for_the_config_gets_it_inside_vllm(tmp_path):
    """The same package in both hosts: rotated pairs are taken apart by the config's size of a head (W2)."""
    import shutil

    folder = tmp_path / "heron_asking"
    shutil.copytree(HERON, folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = folder / "model.py"
    text = model.read_text()
    for old, new in (
        ("def from_checkpoint(tensors: Iterator[tuple[str, Tensor]])", "def from_checkpoint(tensors, config)"),
        ("unflatten(0, (-1, 16, 2))", "unflatten(0, (-1, config.head_dim // 2, 2))"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    model.write_text(text)
    subject = Subject(str(folder))
    assert not run_checks(subject, levels=[Level.CPU], suites=["weights", "attention"]).failures
    result = run(subject, "in_vllm")
    assert result.outcome is Outcome.PASSED, result.message


def test_what_isnt_declared_for_vllm_doesnt_apply():
    result = run(Subject(str(HERON)), "in_vllm_on_two_ranks")
    assert result.outcome is Outcome.NOT_APPLICABLE
