"""What a run is reported as and leaves behind: summaries, reports, records, and the command."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from mrv2 import LLM, SamplingParams
from mrv2.errors import LocalAdapterError, RecordError, TargetError
from mrv2.testing import (
    Level,
    Outcome,
    Result,
    Subject,
    Target,
    run_checks,
)
from mrv2.testing.check import Job, Report, run_job
from mrv2.testing.record import merge_record, read_record, record_path, stale, standing, write_record
from mrv2.testing.reports import picture, to_dict, to_html, to_junit
from mrv2.testing.results import Check, summarize, up_to
from mrv2.testing.subject import find_adapter
from mrv2.testing.suites import all_checks

HERON = Path(__file__).parent / "mutants" / "heron"


# -- reports -------------------------------------------------------------------------------------------------------


def result(level=Level.CPU, outcome=Outcome.PASSED, message="", **details):
    return Result(
        check="a_check", suite="attention", title="What <is> checked", level=level, config="tiny", outcome=outcome,
        message=message, details=details,
    )  # fmt: skip


LAYERS = {"layers": ["layers.0", "layers.1"], "errors": [1e-6, float("nan")], "bound": 1e-3, "against": "the reference"}
REPORT = Report(
    adapter="heron",
    version="1.0",
    reference="none",
    results=(
        result(Level.STATIC),
        result(outcome=Outcome.FAILED, message="compared: a & b\x00", **LAYERS),
        result(),
        result(outcome=Outcome.NOT_APPLICABLE, message="there is nothing"),
        result(Level.GPU, Outcome.NOT_RUN, "there is no GPU here"),
    ),
)


def test_levels_are_summed_up():
    states = {s.level: s.state for s in REPORT.levels}
    assert states == {"L0": "passed", "L1": "failed", "L2": "not run", "L3": "not run"}
    part = summarize([result(Level.GPU), result(Level.GPU, Outcome.NOT_RUN, "no second GPU")])
    assert str(part[2]) == "L2 GPU     incomplete  1 passed, 1 not run (no second GPU)"
    assert not REPORT.passes(up_to("L0"))


def test_reports_in_every_form():
    data = json.loads(json.dumps(to_dict(REPORT)))
    assert data["levels"]["L2"]["state"] == "not run"
    suites = ElementTree.fromstring(to_junit(REPORT))
    assert [(s.get("tests"), s.get("failures"), s.get("skipped")) for s in suites] == [
        ("1", "0", "0"), ("3", "1", "1"), ("1", "0", "1"), ("0", "0", "0"),
    ]  # fmt: skip
    html = to_html(REPORT)
    assert "What &lt;is&gt; checked" in html
    assert html.count("<svg") == 1
    assert not any(word in html for word in ("http://", "https://", "<script", "src="))
    drawn = ElementTree.fromstring(picture(LAYERS["layers"], LAYERS["errors"], 1e-3))
    assert [c.get("class") for c in drawn.iter("circle")] == ["good", "bad"]


@pytest.mark.parametrize(("given", "variable", "expected"), [(None, None, 1), (HERON, None, 3), (None, "3", 3)])
def test_small_models_run_in_one_thread(given, variable, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(3)
    try:
        one = Check(
            suite="static", name="threads", levels=(Level.CPU,), whole=True,
            function=lambda subject: seen.append(torch.get_num_threads()),
        )  # fmt: skip
        done = run_job(Subject(str(HERON), Target(checkpoint=given)), Job(check=one, level=Level.CPU, config=""))
        assert (done.outcome, seen, torch.get_num_threads()) == (Outcome.PASSED, [expected], 3)
    finally:
        torch.set_num_threads(before)


def test_every_check_says_what_it_checks():
    checks = all_checks()
    assert len({c.id for c in checks}) == len(checks)
    for one in checks:
        assert one.title, one.id
        assert one.function.__doc__.split("\n")[0].endswith("."), one.id


# -- records -------------------------------------------------------------------------------------------------------


def test_a_record_holds_until_a_file_changes(heron):
    folder = heron("heron_recorded")
    entry = Subject(str(folder)).entry
    assert standing(entry) == ""
    passed = Report(adapter="heron", version="1", reference="none", results=(result(Level.STATIC), result()))
    path = write_record(entry, passed)
    assert path == folder / "conformance.json"
    assert standing(entry) == "L0 L1"
    gpu = Report(adapter="heron", version="1", reference="none", results=(result(Level.GPU),))
    write_record(entry, gpu)  # on another machine
    assert standing(entry) == "L0 L1 L2"
    record = read_record(entry)
    assert set(record["files"]) == {f.name for f in HERON.iterdir() if f.is_file()}
    assert record["levels"]["L1"]["environment"]["torch"] == torch.__version__
    (folder / "model.py").write_text("# changed\n")
    assert standing(entry) == "stale"
    assert stale(entry, record) == "files of the package have changed since"
    write_record(entry, gpu)  # what was stale isn't kept
    assert standing(entry) == "L2"
    path.write_text("{")
    assert standing(entry) == "damaged"
    with pytest.raises(RecordError, match="something failed"):
        write_record(entry, REPORT)
    assert record_path(entry) == path


@pytest.mark.parametrize("levels", ['{"L9": {}}', '{"L1": true}', "[" * 100_000])
def test_a_record_that_was_written_by_hand_is_damaged(levels, heron):
    entry = find_adapter(str(heron("heron_by_hand")))[1]
    write_record(entry, replace(REPORT, results=(result(Level.STATIC),)))
    good = json.loads(record_path(entry).read_text())
    text = json.dumps(good | {"levels": "LEVELS"}).replace('"LEVELS"', levels)
    record_path(entry).write_text(text)
    assert standing(entry) == "damaged"


def test_a_record_is_written_whole_and_hidden_files_are_no_part_of_it(heron, monkeypatch):
    folder = heron("heron_whole")
    entry = find_adapter(str(folder))[1]
    path = write_record(entry, replace(REPORT, results=(result(Level.STATIC),)))
    (folder / ".model.py.swp").write_text("an editor's")
    assert standing(entry) == "L0"
    before, files = path.read_text(), set(folder.iterdir())
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(RecordError, match="No space left"):
        write_record(entry, replace(REPORT, results=(result(Level.STATIC),)))
    assert path.read_text() == before
    assert set(folder.iterdir()) == files


def test_records_of_two_machines_become_one(heron, tmp_path):
    folder = heron("heron_twice")
    entry = Subject(str(folder)).entry
    path = record_path(entry)
    elsewhere = tmp_path / "theirs.json"

    def record(*levels):
        results = tuple(result(level) for level in levels)
        write_record(entry, Report(adapter="heron", version="1", reference="none", results=results))
        return path.read_text()

    both = record(Level.STATIC, Level.CPU)
    elsewhere.write_text(record(Level.GPU))
    path.write_text(both)  # what was recorded here, knowing nothing of the other
    record(Level.VLLM)
    done = subprocess.run(
        [sys.executable, "-m", "mrv2.testing.record", str(folder), str(elsewhere)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert standing(entry) == "L0 L1 L2 L3"
    theirs = json.loads(elsewhere.read_text())
    theirs["levels"]["L1"]["date"] = "2000-01-01"
    theirs["levels"]["L0"] |= {"date": "2999-01-01", "passed": 99}
    elsewhere.write_text(json.dumps(theirs))
    merge_record(entry, elsewhere)
    levels = read_record(entry)["levels"]
    assert levels["L0"]["passed"] == 99  # the later one
    assert levels["L1"]["date"] > "2000-01-01"
    for change, why in (
        ({"adapter": "other"}, "it is of adapter other"),
        ({"mrv2": "0"}, "it was made with mrv2 0"),
        ({"files": {}}, "files of the package have changed since"),
    ):
        elsewhere.write_text(json.dumps(theirs | change))
        with pytest.raises(RecordError, match=why):
            merge_record(entry, elsewhere)
    with pytest.raises(RecordError, match="there is no such file"):
        merge_record(entry, tmp_path / "absent.json")


# -- the command ---------------------------------------------------------------------------------------------------


def mrv2(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "mrv2", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_check_passes_the_sample_and_records(heron, tmp_path):
    folder = heron("heron_command")
    html, junit = tmp_path / "r.html", tmp_path / "r.xml"
    done = mrv2("check", folder, "--level", "L0", "--level", "L1", "--html", html, "--junit", junit, "--record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "L1 CPU     passed" in done.stdout
    assert "recorded in" in done.stdout
    assert "<svg" in html.read_text()
    assert ElementTree.parse(junit).getroot().tag == "testsuites"
    listed = json.loads(mrv2("list", "--json", "--adapter", folder).stdout)["adapters"]
    (about,) = [a for a in listed if a["name"] == "heron"]
    assert sorted(about["conformance"]["levels"]) == ["L0", "L1"]
    assert about["conformance"]["stale"] is None
    (folder / "state.py").write_text((folder / "state.py").read_text() + "\n")
    assert " stale " in mrv2("list", "--adapter", folder).stdout


def test_check_fails_by_name_and_asks_for_levels(heron):
    folder = heron("heron_failing", model=[("[bool] = True", "[bool] = False")])
    done = mrv2("check", folder, "--suite", "static", "--suite", "sampling")
    assert done.returncode == 1
    assert "set recurrent = True" in done.stdout
    assert "the model can't be loaded" in done.stdout
    done = mrv2("check", HERON, "--suite", "static", "--require", "L2", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["passes"] is False
    for wrong in (["--require", "L9"], ["--suite", "nothing"], ["--suite", "static", "--record"]):
        done = mrv2("check", HERON, *wrong)
        assert done.returncode == 2
        assert "MRV2-500" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        b"[project",
        b"\xff",
        b"project = [1]",
        b"[project]\nentry-points = 3",
        b"[project.entry-points]\n'mrv2.adapters' = 1",
    ],
)
def test_a_project_file_that_is_none(text, tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(text)
    with pytest.raises(LocalAdapterError, match=r"can't be read|declares no adapter"):
        find_adapter(str(tmp_path))


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_is_not_the_current_folder(name, heron, monkeypatch):
    monkeypatch.chdir(heron("heron_here"))
    with pytest.raises(LocalAdapterError, match="empty"):
        find_adapter(name)


@pytest.mark.parametrize(("text", "says"), [(b"print 'x'\n", "old.py:1: SyntaxError"), (b"x = '\xe9'\n", "old.py")])
def test_a_file_that_is_not_python_is_named(text, says, heron):
    folder = heron(f"heron_old{len(text)}")
    (folder / "old.py").write_bytes(text)
    (folder / "nowhere.py").symlink_to("absent.py")
    report = run_checks(Subject(str(folder)), levels=[Level.STATIC], suites=["static"])
    (failed,) = report.failures
    assert says in failed.message.splitlines()[1]


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/a", "a\n", ""])
def test_names_of_configs_are_names_of_files(name):
    with pytest.raises(TargetError):
        Target(configs={name: None})


def test_a_project_folder_and_a_single_file(heron, tmp_path):
    (tmp_path / "src").mkdir()
    heron("src/heron_project")
    (tmp_path / "pyproject.toml").write_text('[project.entry-points."mrv2.adapters"]\nheron = "heron_project"\n')
    done = mrv2("check", tmp_path, "--suite", "static", "--level", "L0")
    assert done.returncode == 0, done.stdout + done.stderr
    hello = Path(__file__).parents[2] / "examples" / "hello.py"
    done = mrv2("check", hello, "--suite", "static")
    assert done.returncode == 1
    assert "there is no config to test with" in done.stdout


def test_every_command_takes_the_project_folder(heron, tmp_path, monkeypatch):
    """As `mrv2 check` does, by the same rules: also of a word without a slash, and with the same errors."""
    project = tmp_path / "acme"
    (project / "src").mkdir(parents=True)
    package = heron("acme/src/heron_everywhere")
    (project / "pyproject.toml").write_text('[project.entry-points."mrv2.adapters"]\nheron = "heron_everywhere"\n')
    monkeypatch.chdir(tmp_path)
    for given in (project, "acme", "./acme/", package, "acme/src/heron_everywhere"):
        done = mrv2("show", "heron", "--adapter", given, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["manifest"] == str(package / "adapter.toml")
    subject = Subject(str(package))  # kept: its checkpoints go with it
    model = subject.case("heron", Level.CPU).folder
    with LLM(str(model), adapters="acme", device="cpu") as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].outputs[0].token_ids) == 2
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    done = mrv2("generate", model, "--adapter", "acme", "--input", "ids.jsonl", "--max-tokens", "2", "--json")
    assert done.returncode == 0, done.stderr
    for command in (("check",), ("list", "--adapter"), ("parity", model, "--adapter")):
        for given, says in (
            (tmp_path / "nothing", "doesn't exist"),
            (project / "src", "has no __init__.py"),
            ("", "empty"),
        ):
            done = mrv2(*command, given)
            assert done.returncode == 2
            assert "MRV2-113" in done.stderr
            assert says in done.stderr
    (project / "pyproject.toml").write_text("[project]\n")
    for command in (("check",), ("trace", model, "--adapter"), ("bench", model, "--adapter")):
        assert "is a project, and declares no adapter" in mrv2(*command, project).stderr
