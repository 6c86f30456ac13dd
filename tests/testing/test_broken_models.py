"""A model that doesn't run: its one cause is said once, and nothing else is hidden by it."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from mrv2.testing import Level, Outcome, Subject, run_checks
from mrv2.testing.reports import to_html, to_junit

pytest_plugins = ["pytester"]

FINISH = "return ctx.finish(self.norm, h, lambda x: x * self.final_scale)"
SCALE = "scale = self.embed_scale * (1 + gain[:, None])"
RAISES = (SCALE, SCALE.replace("embed_scale", "embed_scal"))
BY_ROW = ("        value = self.by_row", "        value = self.by_ro")
BROKEN = [
    pytest.param("model", RAISES, "has no attribute 'embed_scal', raised at", id="raises"),
    pytest.param("model", (FINISH, "return ctx.finish(self.norm, h)[:, 1:]"), "a tensor [23, 63]", id="shape"),
    pytest.param("model", (FINISH, "ctx.finish(self.norm, h)"), "a NoneType, expected a tensor", id="nothing"),
    pytest.param("model", (FINISH, FINISH.replace("x * self", "x / 0 * self")), "position 0: not a number", id="nan"),
]
TEST = "from mrv2.testing import AdapterConformance\n\nclass TestIt(AdapterConformance):\n    adapter = {path!r}\n"
PYTEST = ("--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-p", "mrv2.testing.plugin")
NOT_RUN = "the model doesn't run: weights_runs failed"


def mrv2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mrv2", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("file", "change", "says"), BROKEN)
def test_a_model_that_does_not_run_fails_once(file, change, says, heron, request):
    folder = heron(f"heron_{request.node.callspec.id}", **{file: [change]})
    report = run_checks(Subject(str(folder)), levels=[Level.STATIC, Level.CPU])
    (failure,) = report.failures
    assert failure.check == "weights_runs"
    assert says in failure.message
    rest = [r for r in report.results if r.outcome is Outcome.NOT_RUN]
    assert {r.message for r in rest} == {NOT_RUN}
    assert {r.suite for r in rest} >= {"inputs", "state", "attention", "sampling", "end-to-end", "host-parity"}
    assert [s.state for s in report.levels[:2]] == ["passed", "failed"]
    assert not report.passes([Level.CPU])
    passed = {r.check for r in report.results if r.outcome is Outcome.PASSED}
    assert passed >= {"weights_loads", "inputs_buffers_stay", "state_adding_only_stages"}  # need no forward


def test_the_line_of_the_adapter_is_named(heron):
    folder = heron("heron_line", model=[RAISES])
    report = run_checks(Subject(str(folder)), levels=[Level.CPU], suites=["weights"])
    lines = (folder / "model.py").read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if "embed_scal *" in line)
    assert f"raised at {folder / 'model.py'}:{at}, within " in report.failures[0].message  # which is torch's


def test_the_cause_is_said_by_whichever_check_comes_first(heron):
    folder = heron("heron_some", model=[RAISES])
    done = mrv2("check", folder, "--suite", "sampling", "--suite", "host-parity", "--level", "L1")
    assert done.returncode == 1
    assert done.stdout.count("has no attribute 'embed_scal'") == 1
    assert "L1 CPU     failed      1 failed, 2 not run (the model doesn't run: sampling_logits failed)" in done.stdout


def test_other_failures_are_shown_beside_it(heron):
    moved = ("return self.buffer[:num_tokens].zero_()", "return torch.zeros(num_tokens)")
    folder = heron("heron_two", model=[RAISES], state=[moved])
    report = run_checks(Subject(str(folder)), levels=[Level.CPU])
    assert [same[0].check for same in report.causes] == ["weights_runs", "inputs_buffers_stay"]


def test_an_error_that_many_checks_meet_is_shown_once(heron):
    folder = heron("heron_many", state=[BY_ROW])
    done = mrv2("check", folder, "--level", "L1", "--json")
    assert done.returncode == 1
    results = json.loads(done.stdout)["results"]
    failed = [r for r in results if r["outcome"] == "failed"]
    assert len(failed) > 2
    assert [r["same_as"] for r in failed] == [None] + ["weights_runs[heron-L1]"] * (len(failed) - 1)
    report = run_checks(Subject(str(folder)), levels=[Level.CPU], suites=["weights", "inputs"])
    (same,) = report.causes
    assert len(same) == len(report.failures) == 3
    html = to_html(report)
    assert html.count("has no attribute") == 1
    assert "The same in 2 more: inputs_buffers_stay[heron-L1], inputs_padding_is_neutral[heron-L1]" in html
    assert len(list(ElementTree.fromstring(to_junit(report)).iter("failure"))) == 3


def test_an_error_of_batches_only_is_shown_once(heron):
    """The model runs alone, so the checks that feed it are run; with several requests each ends in the same error."""
    alone = (
        "        value = self.by_row",
        '        assert view.num_reqs == 1, "one only"\n        value = self.by_row',
    )
    report = run_checks(Subject(str(heron("heron_batches", state=[alone]))), levels=[Level.CPU])
    assert not any(r.outcome is Outcome.NOT_RUN for r in report.results)
    same = next(same for same in report.causes if "one only" in same[0].message)
    assert len(same) > 10
    assert len(report.causes) < 4


def test_errors_that_differ_are_not_counted_as_one(heron):
    """The same line and class, another text."""
    counted = (
        "        value = self.by_row",
        "        raise RuntimeError(view.num_tokens)\n        value = self.by_row",
    )
    report = run_checks(Subject(str(heron("heron_each", state=[counted]))), levels=[Level.CPU], suites=["inputs"])
    assert len(report.causes) == len({r.message for r in report.failures}) > 1


@pytest.mark.parametrize("ci", [True, False], ids=["in_ci", "at_a_desk"])
def test_under_pytest(ci, pytester, heron, monkeypatch):
    """In CI pytest repeats every message whole in its short summary, at a desk it cuts them to the line."""
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    monkeypatch.delenv("CI", raising=False)
    if ci:
        monkeypatch.setenv("CI", "true")
    folder = heron("heron_pytest", state=[BY_ROW])
    pytester.makepyfile(test_it=TEST.format(path=str(folder)))
    done = pytester.runpytest_subprocess(*PYTEST, "-k", "weights or inputs or sampling")
    text = done.stdout.str()
    assert done.ret == 1
    failures, _, summary = text.partition("short test summary info")
    assert failures.count("Traceback") + failures.count("state.py:41: AttributeError") == 1  # one trace
    again = "the failure of test_weights_runs[heron-L1], met again: AttributeError: 'Gain' object has no attribute"
    assert failures.count(again) == 2
    assert summary.count(again) == (2 if ci else 0)
    assert f"L1 CPU     failed      3 failed, 3 passed, 8 not run ({NOT_RUN})" in text


def test_under_pytest_with_the_first_test_left_out(pytester, heron):
    folder = heron("heron_left_out", model=[RAISES])
    pytester.makepyfile(test_it=TEST.format(path=str(folder)))
    done = pytester.runpytest_subprocess(*PYTEST, "-k", "sampling and L1")
    assert done.ret == 1
    assert "1 failed, 1 not run (the model doesn't run: sampling_logits failed)" in done.stdout.str()
