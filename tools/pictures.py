"""Draw ``docs/report.png``: the page of a short run, as a browser shows it. Others go to ``build``: dark, narrow, wide.

Needs playwright and a Chromium, its own or the system's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "gallery" / "slow_loader.py"


def main() -> None:
    """Run the script, write its page, and photograph it."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        command = [sys.executable, "-m", "deep500_timing"]
        for arguments in (["run", "--quiet", "--run", "first", str(SCRIPT)], ["report", "first", "-o", "page.html"]):
            subprocess.run([*command, *arguments], cwd=scratch, check=True)
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for path, width, height, scheme in (
            (ROOT / "docs" / "report.png", 1280, 1500, "light"),
            (ROOT / "build" / "report-dark.png", 1280, 1100, "dark"),
            (ROOT / "build" / "report-400.png", 400, 1100, "light"),
            (ROOT / "build" / "report-1600.png", 1600, 1100, "light"),
        ):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(Path(scratch, "page.html").as_uri())
            page.wait_for_selector("html[data-drawn=yes]")
            page.screenshot(path=path)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
