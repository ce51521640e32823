"""The page in a browser: on a phone, on paper, with the keyboard, offline, filtered."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.report.export import html
from tests.benchmarks.report.fake_runs import report, write_pair
from tests.browser import Browser, open_browser

pytestmark = pytest.mark.slow
PHONE_PX, A4_PX = 390, 703  # of A4, the width between margins of 12 mm
INITS = {
    "random": [10.0, 12.0],
    "moco with a name of more than one word (200 epochs)": [20.0, 21.0],
    "supervised_" + "without_a_place_to_break_" * 3: [30.0, 33.0],
}
# Elements that are wider than their place, and what a browser would cut or scroll.
CUT = """[...document.querySelectorAll("main *")].filter((e) => {
  const { left, right } = e.getBoundingClientRect();
  return left < 0 || right > innerWidth + 1 ||
    (getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1);
}).map((e) => e.outerHTML.slice(0, 80))"""
HEAD = "document.querySelector('table.ours').tHead.rows[0].cells"
NAMES = (
    "[...document.querySelectorAll('table.ours tbody')[0].rows].map((r) => r.cells[0].innerText)"
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Write the page of two tasks, and a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    for task in ("mask_rcnn_R_50_FPN_1x", "faster_rcnn_R_50_C4_24k"):
        write_pair(folder / "runs" / task, INITS, task=task)
    found = {}
    for name, text in html(report(folder / "runs")).items():
        (folder / name).write_text(text, encoding="utf-8")
        found[name.split("-")[0].removesuffix(".html")] = folder / name
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("name", ["table", "compare"])
def test_no_column_is_cut_on_a_phone_and_on_paper(pages, browser, tmp_path, name):
    for label, width, media in (("phone", PHONE_PX, ""), ("paper", A4_PX, "print")):
        browser.open(pages[name].as_uri(), width, media=media)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), label
        assert browser.value("innerWidth") == width
        assert browser.value(CUT) == [], label
        with Image.open(browser.screenshot(tmp_path / f"{label}.png")) as image:
            assert image.width == width and len(image.convert("RGB").getcolors(1 << 20)) > 20
    content = browser.print_a4(tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF") and len(content) > 10_000


def test_a_number_on_a_phone_has_the_head_of_its_column(pages, browser):
    browser.open(pages["table"].as_uri(), PHONE_PX)
    cell = "document.querySelector('table.ours td:nth-child(3)')"
    assert browser.value(f"getComputedStyle({cell}, '::before').content") == '"AP50"'


def test_columns_are_sorted_with_the_keyboard(pages, browser):
    browser.open(pages["table"].as_uri(), 1280)
    before = browser.value(NAMES)
    wanted = f"document.activeElement === {HEAD}[2].firstChild"
    for _ in range(60):
        browser.press("Tab")
        if browser.value(wanted):
            break
    assert browser.value(wanted), "a head can be reached with Tab"
    assert browser.value(f"getComputedStyle({HEAD}[2].firstChild).outlineStyle") == "solid"
    browser.press("Enter", "\r")
    assert browser.value(f"{HEAD}[2].getAttribute('aria-sort')") == "descending"
    assert browser.value(NAMES) == before[::-1]
    browser.press("Enter", "\r")
    assert browser.value(f"{HEAD}[2].getAttribute('aria-sort')") == "ascending"
    assert browser.value(NAMES) == before


def test_it_opens_and_searches_without_a_network(pages, browser):
    browser.open(pages["table"].as_uri(), 1280)
    assert all(url.startswith(("file:", "data:")) for url in browser.requests)
    assert browser.value("[...document.images].every((i) => i.complete && i.naturalWidth > 0)")
    browser.value(
        "{ const box = document.querySelector('input[type=search]'); box.value = 'SUPER mask';"
        "box.dispatchEvent(new Event('input')); }"
    )
    shown = "[...document.querySelectorAll('table.ours tbody tr')].filter((r) => !r.hidden)"
    assert browser.value(f"{shown}.map((r) => r.cells[0].innerText.slice(0, 10))") == ["supervised"]
    assert browser.value(
        "[...document.querySelectorAll('section[id^=table]')].map((s) => s.hidden)"
    ) == [True, False]
    assert browser.value("document.querySelector('output').value").endswith("rows")
    browser.load("Page.reload")
    assert browser.value("document.querySelector('input[type=search]').value") == "SUPER mask"
    browser.value("sessionStorage.clear()")


def test_the_contents_and_the_gaps_lead_somewhere(pages, browser):
    browser.open(pages["table"].as_uri(), 1280)
    goals = "[...document.querySelectorAll('nav a')].map((a) => a.getAttribute('href'))"
    for goal in browser.value(goals):
        assert browser.value(f"document.getElementById({goal[1:]!r}) !== null"), goal
    links = "[...new Set([...document.querySelectorAll('.gap a')].map((a) => a.href))]"
    addresses = browser.value(links)
    assert len(addresses) == 4
    for address in addresses:
        browser.open(address, 1280)
        assert "−" in browser.value("document.title")
