"""The clean sample, to be copied and changed."""

from pathlib import Path

import pytest

HERON = Path(__file__).parent / "mutants" / "heron"


@pytest.fixture
def heron(tmp_path):
    """heron(name, **changes of files) -> a copy of the sample."""

    def make(name, **changes):
        folder = tmp_path / name
        folder.mkdir()
        for file in HERON.iterdir():
            if file.is_file():
                text = file.read_text()
                for old, new in changes.get(file.stem.strip("_"), ()):
                    assert old in text
                    text = text.replace(old, new)
                (folder / file.name).write_text(text)
        return folder

    return make
