"""The viewer in a real browser on a large run: chromium opens a step of ``--responses`` responses of ``--tokens``
tokens, one of its responses, and a run of ``--steps`` steps of ``--metrics`` metrics, and scrolls.

Seconds count from the click, or from the address, to the second frame after what was asked for is in the document; CPU
seconds are those of server and browser together until then, which other work on the machine does not lengthen. The
server is `megatron-retool view` in a process of its own that has read nothing yet; its memory is the most that it held
until the end. Baseline of the response: the same texts as bare elements in a file of their own, without a server.

Needs Debian's chromium and playwright:

    python benchmarks/viewer_browser.py
"""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.viewer import STEP, make_metrics, make_step, make_tokenizer, options_of
from megatron_retool.config import load_config, save_config

FRAMES = 60
# Seconds from the beginning of the page, or from `began`, to the second frame after the selector is in the document.
SHOWN = """([selector, began]) => new Promise((done) => {
  const look = () => document.querySelector(selector)
    ? requestAnimationFrame(() => requestAnimationFrame(() => done((performance.now() - (began ?? 0)) / 1000)))
    : requestAnimationFrame(look);
  look();
})"""
GO = "(hash) => { const began = performance.now(); location.hash = hash; return began; }"
# The frame that a jump to the middle takes, and the longest of a scroll by a screen's half each frame from there on.
SCROLL = """async ([selector, frames]) => {
  const box = selector ? document.querySelector(selector) : document.scrollingElement;
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const began = await frame();
  box.scrollTop = box.scrollHeight / 2;
  await frame();
  const first = (await frame()) - began;
  let longest = 0, last = performance.now();
  for (let number = 0; number < frames; number++) {
    box.scrollTop += innerHeight / 2;
    const now = await frame();
    longest = Math.max(longest, now - last);
    last = now;
  }
  return [first / 1000, longest / 1000];
}"""


class Machine:
    """CPU seconds of the server and of the browser, and what the server held at most."""

    def __init__(self, server: int) -> None:
        self._server = server

    def seconds(self) -> dict[int, float]:
        """By process; one that has ended is gone."""
        children = psutil.Process().children(recursive=True)
        return {process.pid: seconds for process in children if (seconds := _cpu(process)) is not None}

    def peak_mebibytes(self) -> float:
        status = Path(f"/proc/{self._server}/status").read_text(encoding="ascii")
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _cpu(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return None
    return float(times.user + times.system)


def bare_page(tokens: list[str], file: Path) -> str:
    spans = "".join(f"<span>{html.escape(text)}</span>" for text in tokens)
    file.write_text(f"<!doctype html><meta charset=utf-8><pre id=bare>{spans}</pre>", encoding="utf-8")
    return file.as_uri()


def measure(run_dir: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "megatron_retool", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        machine = Machine(server.pid)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.set_default_timeout(600_000)
        step = f"#/run/./step/{STEP}"

        def timed(name: str, act: Callable[[], float]) -> float:
            before = machine.seconds()
            seconds = act()
            cpu = sum(after - before.get(process, 0.0) for process, after in machine.seconds().items())
            print(f"{name:46} {seconds:6.2f} s  {cpu:6.2f} s of CPU", flush=True)
            return seconds

        def opened(place: str, selector: str) -> float:
            tab.goto(place, wait_until="commit")
            return float(tab.evaluate(SHOWN, [selector, None]))

        def clicked(place: str, selector: str) -> float:
            began = tab.evaluate(GO, place)
            return float(tab.evaluate(SHOWN, [selector, began]))

        def scrolled(name: str, selector: str | None) -> None:
            first, longest = tab.evaluate(SCROLL, [selector, FRAMES])
            print(f"{name:46} {first:6.2f} s to the middle, longest of {FRAMES} frames {longest:5.2f} s", flush=True)

        try:
            timed("the page, nothing read", lambda: opened(address, ".page"))
            timed("the step, from its address", lambda: opened(address + "?again" + step, ".group"))
            scrolled("  its groups scrolled", ".groups")
            response = timed("a response, clicked on", lambda: clicked(f"{step}/0/0", ".token"))
            scrolled("  scrolled", None)
            timed("another response of the group", lambda: clicked(f"{step}/0/1", "[data-response='0/1'] .token"))
            timed("the step again, its answer kept", lambda: clicked(step, ".group"))
            timed("all curves of the run", lambda: clicked("#/run/.", ".js-plotly-plot .main-svg"))
            page = tab.request.get(f"{address}api/runs/~/steps/{STEP}/0/0").json()
            bare = bare_page(page["texts"], folder / "bare.html")
            baseline = timed("the response's texts alone (baseline)", lambda: opened(bare, "#bare"))
            print(f"response to baseline: {response / baseline:.2f}")
            print(f"most that the server held: {machine.peak_mebibytes():.0f} MiB")
        finally:
            browser.close()
            server.terminate()


def main() -> None:
    options = options_of(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_dir = folder / "run"
        vocabulary = make_tokenizer(run_dir / "tokenizer")
        save_config(load_config(None, [f"model.path={run_dir / 'tokenizer'}"]), run_dir / "config.yaml")
        make_step(run_dir, options.responses, options.tokens, vocabulary=vocabulary)
        make_metrics(run_dir, options.steps, options.metrics)
        load = [round(each) for each in psutil.getloadavg()]
        about = {"cores": psutil.cpu_count(), "load before": load, "responses": options.responses}
        print(json.dumps(about | {"tokens": options.tokens, "vocabulary": vocabulary}))
        measure(run_dir, folder)


if __name__ == "__main__":
    main()
