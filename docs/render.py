"""Writes what the program prints into the pages that show it: python docs/render.py (`make docs`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "config.md"
BEGIN, END = "<!-- reference -->\n", "<!-- /reference -->"


def main() -> None:
    """Replace the reference tables of config.md."""
    command = [sys.executable, "-m", "phloem", "config", "reference"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{printed}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
