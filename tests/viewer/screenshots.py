"""The pictures of docs/viewer.md, of a run on this machine.

python -m tests.viewer.screenshots RUNS RUN STEP GROUP INDEX [--folder docs/images]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

SIZE = {"width": 1100, "height": 680}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", help="a folder of runs")
    parser.add_argument("run", help="the name of one, as its page's address has it")
    parser.add_argument("step", type=int)
    parser.add_argument("group", type=int)
    parser.add_argument("index", type=int)
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    step = f"#/run/{options.run}/step/{options.step}"
    response = f"{step}/{options.group}/{options.index}"
    pages = (
        ("viewer_runs", "light", "#/"),
        ("viewer_run", "light", f"#/run/{options.run}"),
        ("viewer_step", "light", f"{step}?group={options.group}"),
        ("viewer_tokens", "light", f"{response}?color=surprise&token=12"),
        ("viewer_tokens_dark", "dark", f"{response}?color=log_ratio&token=12"),
    )
    command = [sys.executable, "-m", "megatron_retool", "view", options.runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, theme, place in pages:
            tab = browser.new_page(viewport=SIZE, color_scheme=theme)
            tab.goto(address + place, timeout=300_000)
            tab.wait_for_selector(".page", timeout=300_000)
            tab.wait_for_timeout(2000)
            tab.screenshot(path=str(options.folder / f"{name}.png"), timeout=300_000)
            tab.close()
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
