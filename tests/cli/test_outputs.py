"""Files that a user names for reports: refused before the work if they can't be written, and never instead of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrv2.cli import check, parity
from mrv2.cli.app import run
from mrv2.testing import Level, Outcome, Result
from mrv2.testing.check import Report

HERON = Path(__file__).parents[1] / "testing" / "mutants" / "heron"


@pytest.fixture
def no_work(monkeypatch):
    """Fail if anything begins to run."""

    def begun(*args, **kwargs):
        raise AssertionError("the work began")

    monkeypatch.setattr(check, "_run", begun)
    monkeypatch.setattr(parity, "_load", begun)


@pytest.mark.parametrize(
    "command", [["check", str(HERON), "--junit"], ["check", str(HERON), "--html"], ["parity", "x", "--html"]]
)
@pytest.mark.parametrize("path", ["absent/report", ".", "file/report"])
def test_a_file_that_can_not_be_written_is_refused_at_once(command, path, no_work, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run([*command, path]) == 2
    told = capsys.readouterr().err
    assert path in told
    assert command[-1] in told


def test_one_file_for_two_reports_is_refused(no_work, tmp_path, capsys):
    file = str(tmp_path / "report")
    assert run(["check", str(HERON), "--junit", file, "--html", file]) == 2
    assert "two files" in capsys.readouterr().err


@pytest.fixture
def found(monkeypatch):
    """A run that finds one failure, with a character that no encoding has."""
    failed = Result(
        check="a", suite="static", title="A", level=Level.CPU, config="", outcome=Outcome.FAILED, message="\udc80…"
    )
    report = Report(adapter="heron", version="local", reference="none", results=(failed,))
    monkeypatch.setattr(check, "_run", lambda *args, **kwargs: report)


def test_what_was_found_is_shown_whatever_comes_of_the_files(found, tmp_path, monkeypatch, capsys):
    html = tmp_path / "report.html"
    monkeypatch.setattr(check, "require_writable", lambda *args, **kwargs: None)
    assert run(["check", str(HERON), "--html", str(tmp_path / "absent" / "report")]) == 2
    assert "L1 CPU     failed" in capsys.readouterr().out
    assert run(["check", str(HERON), "--html", str(html)]) == 1
    assert "\\udc80" in html.read_text(encoding="utf-8")


def test_a_record_that_is_not_made_is_told(found, capsys):
    assert run(["check", str(HERON), "--record"]) == 1
    assert "nothing recorded, since something failed" in capsys.readouterr().out


def test_a_terminal_without_our_characters_shows_them_escaped():
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "mrv2", "explain", "--json"], env=env, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"\\u2026" in done.stdout
