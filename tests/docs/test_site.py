"""The site of `make docs`: it builds strictly, and what it is strict about fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mrv2

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tools" / "site"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def build(root, out):
    """Exit code and output of a build of the tree at `root`."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(root / "tools/site/mkdocs.yml"), "-d", str(out)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path):
    """The repository with pages that may be changed."""
    root = tmp_path / "tree"
    (root / "tools").mkdir(parents=True)
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("docs", "tools", "site"):
            (root / path.name).symlink_to(path)
    shutil.copytree(ROOT / "docs", root / "docs")
    shutil.copytree(SITE, root / "tools" / "site", ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    code, said = build(ROOT, tmp_path)
    assert code == 0, said
    assert "WARNING" not in said
    page = (tmp_path / "api" / "index.html").read_text()
    for name, home in mrv2._HOMES.items():
        assert f'id="{home}.{name}"' in page
    assert 'id="mrv2.state.view.StepView.token_to_i"' in page
    assert "batch position of each token" in page  # a comment in the source
    assert "test_weights_loads" in page
    assert 'href="../errors/#mrv2-110"' in (tmp_path / "hooks" / "index.html").read_text()
    pages = "\n".join(f.read_text() for f in tmp_path.rglob("*.html"))
    assert not re.findall(r'(?:src|rel="stylesheet" href)="http[^"]*', pages)  # it works without a network


def test_what_leads_nowhere_or_is_not_in_the_menu_fails(tree, tmp_path):
    (tree / "docs" / "forgotten.md").write_text("# Forgotten\n")
    with (tree / "docs" / "security.md").open("a") as page:
        page.write("\n[a rule](errors.md#mrv2-999)\n")
    code, said = build(tree, tmp_path / "out")
    assert code != 0
    assert "forgotten.md" in said
    assert "mrv2-999" in said


def test_a_link_to_a_file_that_is_not_there_fails(tree, tmp_path):
    with (tree / "docs" / "security.md").open("a") as page:
        page.write("\n[a file](../core/mrv2/no_such.py)\n")
    code, said = build(tree, tmp_path / "out")
    assert code != 0
    assert "no_such.py" in said


def test_a_public_name_without_documentation_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(SITE))
    from public import Reference

    reference = Reference()
    assert list(reference.undocumented()) == []
    reference.find("mrv2.layers:fresh").docstring = None
    reference.find("mrv2.StepView").members["rows"].docstring = None
    reference.find("mrv2.model_state.base:ModelState").members["stage_step"].docstring = None
    assert set(reference.undocumented()) == {
        "mrv2.layers:fresh",
        "mrv2.state.view:StepView.rows",
        "mrv2.model_state.base:ModelState.stage_step",
    }
