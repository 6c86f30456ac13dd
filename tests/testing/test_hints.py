"""Where a reader is sent: the check that comes first, and the cause that it names first."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrv2.testing import Level, Outcome, Subject, run_checks
from mrv2.testing.reports import to_html
from mrv2.testing.results import TOKEN_BY_TOKEN

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"
FROM_STEP = "1. `forward` takes something from the whole step (`positions[0]`"
CALL = "self.attn(h, positions, ctx)"
HOOK = """

@mrv2.hookimpl
def mrv2_test_target(ctx):
    from mrv2.testing import Target

    return Target(configs={"hello": HelloConfig()})
"""


def write(path, *changes):
    text = HELLO.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text + HOOK)
    return path


# -- a model without state ---------------------------------------------------------------------------------------

RELATIVE = {
    "from_the_step": "positions - positions[0]",
    "from_its_mean": "positions + (positions.float().mean() - (len(positions) - 1) / 2 > 0).long()",
}


@pytest.mark.parametrize("name", RELATIVE)
def test_positions_of_the_step_are_found_where_they_are_explained(name, tmp_path):
    path = write(tmp_path / f"hello_{name}.py", (CALL, f"self.attn(h, {RELATIVE[name]}, ctx)"))
    report = run_checks(Subject(str(path)), levels=[Level.CPU], suites=["inputs", "state", "attention"])
    failed = [r for r in report.failures if r.suite == "attention"]
    assert failed == list(report.failures)
    assert [r.check for r in failed][:2] == ["attention_layers", "attention_batches"]
    assert FROM_STEP in failed[0].message
    assert FROM_STEP in failed[1].message
    (rows,) = [r for r in report.results if r.check == "state_rows_are_not_batch_positions"]
    assert (rows.outcome, rows.message) == (
        Outcome.NOT_RUN, "a prompt in chunks, alone, isn't right either: see the suite attention",
    )  # fmt: skip


def test_without_chunks_the_state_suite_says_it_itself(tmp_path):
    """Positions of the step, of a model that declares no chunks: no earlier check and no later one compares them."""
    declared = ('chunked_prefill = "native", prefix_caching = "native", ', "")
    path = write(tmp_path / "hello_whole.py", declared, (CALL, f"self.attn(h, {RELATIVE['from_the_step']}, ctx)"))
    report = run_checks(Subject(str(path)), levels=[Level.CPU], suites=["state"])
    (failure,) = report.failures
    assert failure.check == "state_rows_are_not_batch_positions"
    assert FROM_STEP in failure.message
    assert "indexed by its position in the batch" not in failure.message


def test_a_model_without_state_passes_both(tmp_path):
    path = write(tmp_path / "hello_clean.py")
    report = run_checks(Subject(str(path)), levels=[Level.CPU], suites=["state", "attention"])
    assert not report.failures
    assert all(r.outcome is not Outcome.NOT_RUN for r in report.results)


# -- the report's picture ----------------------------------------------------------------------------------------


def headings(html):
    return re.findall(r"<h2>(.*?)</h2>", html)


def test_the_picture_says_what_it_compares_and_that_the_reference_differs(heron):
    alone = "Whole prompt beside the same token by token, not the reference"
    folder = heron("heron_pictured", model=[("scale=c.query_scale", "scale=c.head_dim**-0.5")])
    wrong = to_html(run_checks(Subject(str(folder)), levels=[Level.CPU], suites=["attention"]))
    right = to_html(run_checks(Subject(str(heron("heron_right"))), levels=[Level.CPU], suites=["attention"]))
    for html in (wrong, right):
        assert alone in headings(html)
        assert "Error after each layer" not in headings(html)
        assert TOKEN_BY_TOKEN in html
    assert "The reference is what differs" in wrong
    assert "The reference is what differs" not in right


# -- a norm's epsilon --------------------------------------------------------------------------------------------

TINY = (
    "HeronConfig()}",
    "tiny_config(HeronConfig, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, embed_scale=22.0)}",
)
IMPORT = ("from mrv2.testing import Target", "from mrv2.testing import Target, tiny_config")


@pytest.mark.parametrize("epsilon", ["c.rms_norm_eps", "1e-6", "1e-5"])
def test_a_norm_that_ignores_the_configs_epsilon_is_noticed(epsilon, heron):
    """Embeddings 22 times as large hide it the most."""
    folder = heron(
        f"heron_eps{len(epsilon)}{epsilon[-1]}", model=[("c.rms_norm_eps", epsilon)], reference=[TINY, IMPORT]
    )
    report = run_checks(Subject(str(folder)), levels=[Level.STATIC, Level.CPU], suites=["static", "weights"])
    if epsilon == "c.rms_norm_eps":
        assert not report.failures
    else:
        (failure,) = report.failures
        assert failure.check == "weights_one_token"
        assert "another epsilon" in failure.message


# -- a target that is missing ------------------------------------------------------------------------------------


def check(path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "mrv2", "check", str(path), *arguments], capture_output=True, text=True, check=False
    )


def test_an_adapter_without_a_target_is_told_how_to_give_one(tmp_path):
    done = check(HELLO)
    assert done.returncode == 1
    last = done.stdout.strip().splitlines()[-2:]
    assert last[0] == "L0, L1 didn't pass in full, and had to"
    assert "mrv2_test_target" in last[1]
    assert "docs/hooks.md" in last[1]
    done = check(write(tmp_path / "hello_target.py"), "--level", "L0", "--level", "L1")
    assert done.returncode == 0, done.stdout
    assert "mrv2_test_target" not in done.stdout
