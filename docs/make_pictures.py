"""The pictures of the README and of these pages, from real runs: `python docs/make_pictures.py` (needs Chromium).

timeline.png: the page with which `fourfold demo` ends, of a demo that this script runs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --hide-scrollbars --window-size=1300,870"
)


def main() -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium here")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "demo"
        subprocess.run([sys.executable, "-m", "fourfold", "demo", "--run-dir", str(run)], check=True)
        shot = [f"--user-data-dir={name}/browser", f"--screenshot={FOLDER / 'timeline.png'}"]
        subprocess.run([browser, *FLAGS.split(), *shot, (run / "timeline.html").as_uri()], check=True)


if __name__ == "__main__":
    main()
