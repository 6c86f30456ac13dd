"""A project fresh from the scaffold passes its own checks, wherever it is put; the tutorial does what it says."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "first-adapter.md"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def level(summary, name):
    """A level's line in what a conformance run printed."""
    return re.search(rf"^\s*{name} .*$", summary, re.M)[0]


def passed(summary):
    """Whether both levels that need no GPU and no vLLM passed, with no test left out."""
    return all("passed" in level(summary, n) and "not run" not in level(summary, n) for n in ("L0", "L1"))


def test_the_tutorial_is_a_decoder_from_nothing_to_a_wheel_elsewhere(fresh, elsewhere):
    parts = re.findall(r"(<!-- elsewhere -->\n)?```(bash|diff)\n(.*?)```", TUTORIAL.read_text(), re.DOTALL)
    assert len(parts) == 10
    printed = {}
    fresh.bash("true", cwd=fresh.work)
    for at, language, text in parts:
        if language == "diff":
            (fresh.cwd / "change.diff").write_text(text)
            printed[text] = fresh.bash("git apply --whitespace=nowarn change.diff && rm change.diff")
        elif not at:
            printed[text] = fresh.bash(text)
        else:
            dist = next(fresh.cwd.glob("dist/*.whl"))
            assert "mrv2_adapter_acme/conformance.json" in zipfile.ZipFile(dist).namelist()
            shutil.copytree(dist.parent, elsewhere.work / "dist")
            printed[text] = elsewhere.bash(text, cwd=elsewhere.work)
    made, tested, _, refused, _, checked, ran, beside, _, there = printed.values()
    assert re.search(r"^acme +mrv2-adapter-acme +0\.1\.0 .* ok$", made, re.M)
    assert "Success: no issues found" in tested
    assert passed(tested)
    assert "model.layers.0.self_attn.q_proj.bias" in refused
    assert passed(checked)
    assert len(re.findall(r"\d+", ran.splitlines()[-1])) >= 5
    assert "the only point, logits, agrees" in beside
    assert "modules weren't compared" in beside
    assert re.search(r"^acme .*L0 L1.* ok$", there, re.M)  # the record came along
    assert passed(there)


@pytest.mark.parametrize("kind", ["moe", "hybrid"])
def test_a_project_passes_where_it_is_made_and_where_it_is_taken(kind, fresh, elsewhere):
    name = f"acme-{kind}"
    fresh.bash(f"mrv2 new-adapter {name} --kind {kind} --ci gitlab\ncd mrv2-adapter-{name}", cwd=fresh.work)
    # Also what isn't run elsewhere: the style of code, and its types.
    fresh.bash('pip install -e ".[dev]"\nruff format --check .\nruff check .\nmypy')
    report = json.loads(fresh.bash(f"mrv2 check {name} --json"))
    assert report["passes"], report
    # Renamed and moved, then built: the editable install is of the old place.
    moved = elsewhere.work / "other" / f"our {kind}"
    moved.parent.mkdir(exist_ok=True)
    fresh.bash(f"pip uninstall -y -q mrv2-adapter-{name}")
    shutil.move(fresh.work / f"mrv2-adapter-{name}", moved)
    elsewhere.bash("pip wheel -w dist .\npip install dist/*.whl\nrm -r src", cwd=moved)
    printed = elsewhere.bash("pytest --mrv2-require L1", cwd=moved)  # as its CI does
    assert passed(printed)
    assert ("test_kernels" in printed) == (kind == "hybrid")


def test_a_long_name_keeps_lines_short(tmp_path):
    """What is made of a name is in code, whose lines and imports have to stay in style."""
    for kind in ("decoder", "moe", "hybrid"):
        name = f"{kind}-" + "-".join(["abcdefgh"] * 5)[: 49 - len(kind)].rstrip("-")
        command = [sys.executable, "-m", "mrv2", "new-adapter", name, "--kind", kind]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    for check in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *check, "--no-cache", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
