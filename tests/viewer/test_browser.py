"""The page in a real browser: Debian's chromium, driven by playwright."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from run_viewer.compare_runs import comparison
from run_viewer.export import export
from run_viewer.server import serve
from tests.viewer.synthetic_run import make_run

CHROMIUM = shutil.which("chromium")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH (apt-get install chromium)")

PAGES = ("#/", "#/run/a", "#/run/a/step/1", "#/run/a/step/1/0/1", "#/run/a/time", "#/run/a/time/2", "#/compare?a=a&b=b")
PHONE = {"width": 390, "height": 800}

# WCAG's contrast of every element that has a text of its own, with what lies behind it; below 4.5 are named.
CONTRAST = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const white = [255, 255, 255, 1];
  const paper = (e) => e ? over(parse(getComputedStyle(e).backgroundColor), paper(e.parentElement)) : white;
  const weak = [];
  for (const e of document.querySelectorAll("header *, main *")) {
    if (e.closest(".js-plotly-plot, .out, :disabled")) continue;
    if (![...e.childNodes].some((c) => c.nodeType === 3 && c.textContent.trim()) || !e.checkVisibility()) continue;
    const below = paper(e), ink = over(parse(getComputedStyle(e).color), below);
    const [a, b] = [light(ink), light(below)].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) weak.push(e.tagName + "." + e.className + " " + contrast.toFixed(2));
  }
  return [...new Set(weak)];
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "a")
    make_run(root / "b", seed=1)
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs) as address:
        yield address


@contextlib.contextmanager
def served(root: Path) -> Iterator[str]:
    started: queue.Queue[str] = queue.Queue()
    loop = asyncio.new_event_loop()

    def work() -> None:  # in a thread of its own: playwright has an event loop in this one
        task = loop.create_task(serve(root, "127.0.0.1", 0, started.put))
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=work)
    thread.start()
    yield started.get(timeout=30)
    loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser) -> Iterator[object]:
    """A tab in which nothing may go wrong unsaid."""
    tab = browser.new_page()
    tab.set_default_timeout(30_000)
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: said.append(str(error)))
    yield tab
    assert not said
    assert tab.evaluate("window.owned") is None, "a model's text has run"
    tab.close()


def visit(tab, address: str, place: str = "") -> None:
    tab.goto("about:blank")  # an address that differs after # alone would not be loaded again
    tab.goto(address + place)
    tab.wait_for_selector(".page, .problems")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_reads_well_in_light_dark_and_on_a_phone(browser, tab, address: str, theme: str) -> None:
    tab.emulate_media(color_scheme=theme)
    for place in PAGES:
        visit(tab, address, place)
        assert tab.inner_text("main").strip(), place
        assert tab.evaluate(CONTRAST) == [], place
        tab.set_viewport_size(PHONE)
        assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], f"{place} is wider than a phone"
        tab.set_viewport_size({"width": 1280, "height": 800})
        assert tab.locator("main img").count() == 0


# Of each chart: room that it takes without drawing, below the title of its axis, and above its legend.
GAPS = """() => [...document.querySelectorAll(".chart")].map((chart) => {
  const box = (selector) => chart.querySelector(selector)?.getBoundingClientRect();
  const whole = chart.getBoundingClientRect(), legend = box(".legend");
  const above = legend ? legend.top - whole.top : 0;
  return [whole.height - box(".main-svg").height, whole.bottom - box(".xtitle").bottom, above];
})"""


def test_charts_of_any_height_leave_no_gaps(tab, address: str) -> None:
    def with_times(route) -> None:
        response = route.fetch()
        page = response.json()
        responses = [one | {"start": 0.0, "end": 1.0 + place} for place, one in enumerate(page["responses"] * 12)]
        spans = [{"name": "gen", "start": 0.5, "seconds": 2.0}]
        route.fulfill(
            response=response, json=page | {"responses": responses, "spans": spans, "ranks": {"learner": [1.0]}}
        )

    tab.route("**/time/2", with_times)
    visit(tab, address, "#/run/a/time/2")
    tab.wait_for_selector(".xtitle")
    gaps = tab.evaluate(GAPS)
    assert len(gaps) == 4 and all(gap <= 30 for chart in gaps for gap in chart), gaps


def test_groups_are_filtered_searched_and_walked_by_keys(tab, runs: Path, address: str) -> None:
    visit(tab, address, "#/run/a/step/1")
    assert tab.inner_text("#count") == "4 of 4 groups, 16 responses"
    tab.select_option("[data-filter=kept]", "dropped")
    assert tab.inner_text("#count") == "1 of 4 groups, 4 responses"
    assert "kept=dropped" in tab.url
    tab.reload()
    tab.wait_for_selector(".group")
    assert tab.inner_text("#count") == "1 of 4 groups, 4 responses", "the address has the filter"
    tab.select_option("[data-filter=kept]", "")
    tab.select_option("[data-filter=tools]", "timeout")
    assert tab.inner_text("#count") == "4 of 4 groups, 4 responses"
    tab.select_option("[data-filter=tools]", "")
    tab.fill("[data-filter=accuracy]", "1")
    right = [row for row in pq.read_table(runs / "a/rollouts/step_000001.parquet").to_pylist()
             if json.loads(row["reward_info"])["acc"] >= 1]  # fmt: skip
    assert tab.inner_text("#count").endswith(f" {len(right)} responses") and 0 < len(right) < 16
    tab.fill("[data-filter=accuracy]", "")
    tab.fill("[data-filter=difference]", "0.4")
    assert tab.inner_text("#count") == "1 of 4 groups, 1 responses"
    tab.fill("[data-filter=difference]", "")
    tab.press("[data-filter=difference]", "Escape")
    tab.keyboard.press("j")
    assert tab.inner_text("#group-detail h2").startswith("Group 1")
    tab.keyboard.press("k")
    assert tab.inner_text("#group-detail h2").startswith("Group 0")
    tab.keyboard.press("/")
    tab.keyboard.type("no such words")
    tab.keyboard.press("Enter")
    tab.wait_for_function("() => document.getElementById('count').textContent.startsWith('0 of 4')")
    tab.fill("#search", "東京")
    tab.press("#search", "Enter")
    tab.wait_for_function("() => document.getElementById('count').textContent.startsWith('4 of 4')")
    tab.press("#search", "Escape")
    tab.keyboard.press("?")
    assert "next group" in tab.inner_text("#keys")


def test_numbers_of_tokens_are_those_of_the_files(tab, runs: Path, address: str) -> None:
    stored = pq.read_table(runs / "a/rollouts/step_000001.parquet").to_pylist()[0]
    learner = pq.read_table(runs / "a/rollouts/step_000001.learner.parquet").to_pylist()[0]
    page = tab.request.get(f"{address}api/runs/a/steps/1/0/0").json()
    assert page["ids"] == stored["response_ids"]
    sampled = [place for place, trained in enumerate(stored["loss_mask"]) if trained]
    for name, column in (
        ("rollout_log_probs", stored["rollout_log_probs"]),
        ("old_log_probs", learner["old_log_probs"]),
    ):
        for place in sampled:
            wanted = "Infinity" if column[place] == float("inf") else pytest.approx(column[place], rel=0, abs=0)
            assert page["columns"][name][place] == wanted
    flips = [None if flips != flips else flips for flips in learner["routing_flips"]]
    assert page["columns"]["routing_flips"] == flips
    visit(tab, address, "#/run/a/step/1/0/0?token=2&color=log_ratio")
    assert tab.inner_text("[data-column=id]") == str(stored["response_ids"][2])
    tab.keyboard.press("n")
    assert tab.inner_text("[data-column=token]") == "3", "the first token with |d| > 0.1"
    assert tab.inner_text("[data-column=log_ratio]") == "0.5"
    assert tab.inner_text("[data-column=rejected]") == "1"
    tab.keyboard.press("n")
    assert tab.inner_text("[data-column=log_ratio]") == "∞"
    assert "token=5" in tab.url
    tab.hover("[data-place='0']")
    assert tab.inner_text("[data-column=token]") == "0"
    assert tab.evaluate("[...document.querySelectorAll('.token')].map((e) => e.textContent).join('')") == "".join(
        page["texts"]
    )
    assert tab.evaluate("document.querySelector('[data-place=\"3\"]').style.background")
    tab.select_option("#color", "routing_flips")
    assert "layers in which the learner's router" in tab.inner_text("#legend")
    for place, flips in ((0, "0"), (3, "3"), (6, "–")):
        tab.hover(f"[data-place='{place}']")
        assert tab.inner_text("[data-column=routing_flips]") == flips
        assert bool(tab.evaluate(f"document.querySelector('[data-place=\"{place}\"]').style.background")) == (
            place == 3
        )


def test_a_number_keeps_its_size(tab, address: str) -> None:
    """Four digits of it; the zeros at its end belong to it."""
    visit(tab, address)
    numbers = [1000.3, 2340.2, 123456.7, 100.04, 0.5, 0.1234567, 1230.0, 1234567.8, 0.00012345, -1230.4, 0.0]
    for number in numbers:
        text = tab.evaluate("async (value) => (await import('/page/elements.js')).shown(value)", number)
        assert float(text.replace(",", "")) == pytest.approx(number, rel=5e-3 if "e" in text else 5e-4), text


def test_calls_unfold_and_two_responses_stand_side_by_side(tab, address: str) -> None:
    visit(tab, address, "#/run/a/step/1/0/2")
    assert "code_interpreter timeout 0.25 s" in tab.inner_text("details.call summary")
    assert not tab.is_visible("details.call pre")
    tab.keyboard.press("f")
    assert tab.inner_text("details.call pre") == "print(6 * 7)"
    tab.select_option("#beside", "0/1")
    tab.wait_for_function("() => document.querySelectorAll('[data-response]').length === 2")
    tab.keyboard.press("j")
    tab.wait_for_selector("[data-response='0/3']")
    assert tab.locator("[data-response]").count() == 1


def test_runs_curves_and_comparison_lead_to_each_other(tab, address: str, runs: Path) -> None:
    visit(tab, address)
    assert tab.locator("tbody tr").count() == 2
    tab.click("a[href='#/run/a']")
    tab.wait_for_selector(".js-plotly-plot .scatterlayer, .js-plotly-plot canvas")
    visit(tab, address, "#/compare?a=a&b=b")
    assert "trainer.seed" in tab.inner_text("main")
    rows = tab.locator("table[aria-label=metrics] tbody tr")
    differing = rows.count()
    equal = [metric["name"] for metric in comparison(runs / "a", runs / "b")["metrics"]
             if not metric["clock"] and metric["first_step_apart"] is None]  # fmt: skip
    assert equal and not set(equal) & set(rows.locator("td:first-child").all_inner_texts())
    tab.click("text=all metrics")
    tab.wait_for_selector("text=only what differs")
    assert rows.count() >= differing + len(equal)


def test_changed_settings_and_figures_stand_before_times_by_short_names(tab, address: str) -> None:
    tab.set_viewport_size({"width": 1440, "height": 900})
    visit(tab, address)
    headings = tab.locator("table[aria-label=runs] th").all_inner_texts()
    assert headings.index("seed") < headings.index("in steps") < headings.index("started")
    assert tab.get_attribute("th span:text-is('seed')", "title") == "trainer.seed"
    assert tab.evaluate(
        "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    )


def test_one_run_is_shown_alone(tab, runs: Path) -> None:
    with served(runs / "a") as address:
        visit(tab, address)
        tab.wait_for_selector("[data-page=run] a[href='#/run/./step/3']")
        visit(tab, address, "#/run/./step/1/0/0?token=3")
        assert tab.inner_text("[data-column=log_ratio]") == "0.5"
        visit(tab, address, "#/run/./time/2")


def test_what_cannot_be_read_is_named_and_the_rest_works(tab, runs: Path, address: str, tmp_path: Path) -> None:
    path = runs / "a/rollouts/step_000003.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        answer = tab.request.get(f"{address}api/runs/a/steps/3")
        assert not answer.ok and "step_000003.parquet" in answer.json()["error"]
    finally:
        path.write_bytes(whole)
    for outside in ("..", quote("../a", safe=""), "a%2f..%2f..", "%2fetc"):
        assert tab.request.get(f"{address}api/runs/{outside}").status == 404
        assert tab.request.get(f"{address}files/a/{outside}%2fpasswd").status == 404
    visit(tab, address, "#/run/a/step/2")


def test_an_exported_file_opens_without_a_server(tab, runs: Path, tmp_path: Path) -> None:
    made = export(runs / "a", tmp_path / "a.html", [1, 2])
    assert made.responses == 32 and made.left_out == 0
    file = (tmp_path / "a.html").as_uri()
    visit(tab, file, "#/run/./step/1/0/0?token=3&color=log_ratio")
    assert tab.inner_text("[data-column=log_ratio]") == "0.5"
    visit(tab, file, "#/run/./step/2?text=東京")
    tab.wait_for_function("() => document.getElementById('count').textContent.startsWith('4 of 4')")
    tab.goto("about:blank")
    tab.goto(file)
    tab.wait_for_selector("[data-page=run]")
    visit(tab, file, "#/run/./time")


def test_a_run_that_trains_is_drawn_anew_by_itself(tab, tmp_path: Path) -> None:
    """Where it was scrolled to, with what was chosen; not while somebody types."""
    run = make_run(tmp_path / "live" / "a", steps=2)
    with served(tmp_path / "live") as address:
        visit(tab, address, "#/run/a?names=actor/grad_norm")
        tab.wait_for_selector("text=step 2 of")
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 3, "actor/grad_norm": 0.3}\n')
        tab.wait_for_selector("text=step 3 of", timeout=12_000)
        assert "names=actor%2Fgrad_norm" in tab.url or "names=actor/grad_norm" in tab.url
        tab.wait_for_selector(".js-plotly-plot")
        tab.focus("[aria-label='add a metric']")
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write('{"step": 4, "actor/grad_norm": 0.4}\n')
        tab.wait_for_timeout(6_000)
        assert "step 3 of" in tab.inner_text("main")


def test_runs_of_another_stack_are_shown_with_what_they_have(tab, tmp_path: Path) -> None:
    """One run has neither texts nor timings, segments or a learner's columns; the other has only config.yaml."""
    for name in ("rollouts", "config"):
        (tmp_path / name / "rollouts").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("lr: 1\n")
    row = {
        "group_id": 0, "index": 0, "prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [True, False],
        "rollout_log_probs": [-0.5, 0.0], "turn_ids": [0, -1], "weight_versions": [0, -1], "finish_reason": "eos",
        "reward": 0.5, "reward_info": "{}", "tool_calls": '[{"name": "search"}, {}]', "extra_info": "{}",
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rollouts" / "rollouts" / "step_000001.parquet")
    with served(tmp_path) as address:
        visit(tab, address, "#/")
        assert "config" in tab.inner_text("main") and "rollouts" in tab.inner_text("main")
        for place in ("", "/step/1", "/step/1/0/0", "/time", "/time/1"):
            visit(tab, address, f"#/run/rollouts{place}")
            assert tab.inner_text("main").strip(), place
        for place in ("", "/time"):
            visit(tab, address, f"#/run/config{place}")
            assert tab.inner_text("main").strip(), place
        visit(tab, address, "#/compare?a=rollouts&b=config")
        assert tab.inner_text("main").strip()
