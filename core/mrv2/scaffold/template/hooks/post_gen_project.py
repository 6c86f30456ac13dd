"""What cookiecutter runs last: folders that these answers have no use for go."""

import shutil

shutil.rmtree(".unused", ignore_errors=True)
