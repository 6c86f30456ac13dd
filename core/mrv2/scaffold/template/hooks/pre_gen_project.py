"""What cookiecutter runs first: a malformed name is refused before anything is written."""

import re
import sys

NAME = """{{ cookiecutter.name }}"""

if re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", NAME) is None:
    sys.exit(f"{NAME!r} is no name: lower-case letters and digits, words joined by single hyphens")
