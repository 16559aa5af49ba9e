"""The page in a real browser: headless Chromium, driven by Playwright, with axe-core for accessibility.

Skipped where no Chromium is found; KRNET_NEED_BROWSER=1 makes that a failure. Screenshots for a person to look at go to
$KRNET_SCREENSHOTS, or a temporary folder, which the tests print.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from krnet.io import ledger
from krnet.report.figure import Entry, PaperNumber
from krnet.report.page import write_page
from krnet.report.sections import Chosen, make_report
from report.rows import hostile, learned, toy_rows

LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")  # the Makefile looks for the same
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
CURVES = "#toy-curves"
PHONE = {"width": 390, "height": 844}


def missing() -> str | None:
    """What the tests lack, or None."""
    try:
        import axe_playwright_python  # noqa: F401
        import playwright  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed: pip install -e '.[dev]'"
    if not any(map(shutil.which, CHROMIUM)):
        return "no Chromium is on the PATH: apt-get install chromium"
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    lack = missing()
    if lack and os.environ.get("KRNET_NEED_BROWSER") == "1":
        pytest.fail(f"KRNET_NEED_BROWSER is 1, and {lack}")
    if lack:
        pytest.skip(lack)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        executable = next(filter(None, map(shutil.which, CHROMIUM)))
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses: of a page with a recipe and the paper's numbers, of a hostile one, of the whole ledger."""
    folder = tmp_path_factory.mktemp("pages")
    paper = [
        PaperNumber(recipe="toy", series="KRIL", x=str(x), value=y, unit="%", place="Table I")
        for x, y in ((4, 88), (8, 66))
    ]
    rows = toy_rows()
    named = {"kril": "KRIL", "joint": "joint", "ewc": "EWC"}
    chosen = [Entry(series=named[row["metrics"]["method"]], row=row) for row in rows[:7]]
    recipe = Chosen(
        name="toy",
        title="Toy recipe",
        text="Two minutes.",
        views=("curves", "last", "matrix"),
        entries=chosen,
        paper=paper,
    )
    reports = {
        "toy": make_report("Toy", "Rows.", rows, [recipe]),
        "hostile": make_report("Hostile", "", [hostile(), learned("kril"), {**hostile(), "outcome": "no <b>"}]),
        "whole": make_report("krnet results", "", ledger.read(LEDGER)),
    }
    for name, report in reports.items():
        write_page(folder / f"{name}.html", report)
    return {name: (folder / f"{name}.html").as_uri() for name in reports}


@pytest.fixture
def visit(browser: Any, pages: dict[str, str]) -> Iterator[Callable[..., Any]]:
    """Open a page; afterwards no error was on its console, and it asked for nothing."""
    trouble: list[str] = []
    contexts = []

    def open_page(name: str, hash: str = "", **options: Any) -> Any:
        context = browser.new_context(accept_downloads=True, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()

        def check(route: Any) -> None:
            if route.request.url.split("#")[0] == pages[name]:
                route.continue_()
                return
            trouble.append(f"asked for {route.request.url}")
            route.abort()

        context.route("**/*", check)
        page.on(
            "console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(pages[name] + hash)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not trouble


def show(page: Any, selector: str) -> Any:
    """Scroll a figure into view and wait until it is drawn."""
    page.eval_on_selector(selector, "element => element.scrollIntoView()")
    page.wait_for_selector(f"{selector} .plot svg")
    return page.locator(selector)


def hover(page: Any, selector: str) -> None:
    """Move the pointer onto a marker, and wait for the tip."""
    page.eval_on_selector(selector, "element => element.scrollIntoView()")
    dot = page.locator(f"{selector} svg circle").first.bounding_box()
    page.mouse.move(dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2)
    page.wait_for_function("at => /so far: \\d/.test(document.querySelector(`${at} svg`).textContent)", arg=selector)


def curves(page: Any, selector: str = CURVES) -> int:
    return page.locator(f"{selector} [data-curve]").count()


def choose(page: Any, filter: str, value: str) -> None:
    """Tick or untick a box of a filter."""
    details = page.locator(".filter", has=page.locator(f"input[name={filter}]"))
    details.locator("summary").click()
    details.get_by_label(value, exact=True).click()
    page.keyboard.press("Escape")


# ------------------------------------------------------------------ figures


def test_a_curve_is_drawn_for_each_series_and_each_of_the_paper(visit):
    page = visit("toy")
    show(page, CURVES)
    assert curves(page) == 4  # KRIL, joint, EWC; and KRIL in the paper
    dashed = page.locator(f"{CURVES} [data-curve]").evaluate_all(
        "all => all.map(one => getComputedStyle(one).strokeDasharray)"
    )
    assert len([dash for dash in dashed if dash != "none"]) == 1
    assert page.locator(f"{CURVES} .legend button").count() == 3


def test_every_figure_of_the_whole_ledger_is_drawn(visit):
    page = visit("whole")
    names = page.locator("article.figure").evaluate_all("all => all.map(one => one.id)")
    assert len(names) > 30
    for name in names:
        show(page, f"#{name}")
    lines = page.locator("article.figure[data-kind=line]")
    assert lines.count() == page.locator("article.figure[data-kind=line]:has(.legend button)").count() > 10


def test_the_numbers_of_seeds_are_said(visit):
    page = visit("toy")
    text = show(page, CURVES).locator(".seeds").inner_text()
    assert text.startswith("Mean and standard deviation of up to 3 seeds. 1 of 3 series rests on one seed.")
    assert text.endswith("Dashed, with hollow markers: the paper.")
    assert show(page, "#toy-last").locator(".seeds").inner_text().endswith("Diamonds: the paper.")


def test_means_and_deviations_are_over_the_seeds(visit):
    page = visit("toy")
    show(page, CURVES)  # KRIL has 70, 71 and 72 % after the last task
    heights = page.evaluate(
        """() => {
          const item = figures.get("toy-curves");
          const ours = item.figure.points.filter(p => p.series === "KRIL" && p.source === OURS);
          return summarize(ours).map(e => [e.x, e.y, e.sd]);
        }"""
    )
    assert [[round(value, 6) for value in row] for row in heights] == [[4, 91, 1], [6, 81, 1], [8, 71, 1]]


def test_a_tip_tells_what_is_under_the_pointer(visit):
    page = visit("toy")
    show(page, CURVES)
    hover(page, CURVES)
    page.wait_for_function(
        "() => /accuracy on all classes so far: 9/.test(document.querySelector('#toy-curves svg').textContent)"
    )


def test_a_series_can_be_switched_off(visit):
    page = visit("toy")
    show(page, CURVES).get_by_role("button", name="joint").click()
    assert curves(page) == 3
    assert page.locator(f"{CURVES} .legend button[aria-pressed=false]").inner_text() == "joint"


def test_the_matrix_of_another_run_can_be_chosen(visit):
    page = visit("toy")
    figure = show(page, "#toy-matrix")
    before = figure.locator("svg").text_content()
    figure.get_by_label("Run:").select_option("EWC")
    assert figure.locator("svg").text_content() != before


# ------------------------------------------------------------------ filters


def test_a_filter_changes_the_curves_and_the_address_keeps_it(visit):
    page = visit("toy")
    show(page, CURVES)
    choose(page, "method", "joint")
    assert curves(page) == 3
    assert "method=kril" in page.url and "method=joint" not in page.url
    again = visit("toy", "#" + page.url.split("#")[1])
    show(again, CURVES)
    assert curves(again) == 3


def test_a_seed_that_is_left_out_is_in_no_mean(visit):
    page = visit("toy", "#seed=0")
    text = show(page, CURVES).locator(".seeds").inner_text()
    assert text.startswith("One seed: how far results scatter is not shown.")


def test_where_nothing_is_left_the_figure_says_so(visit):
    page = visit("toy", "#method=pca")
    page.eval_on_selector("#toy-last", "element => element.scrollIntoView()")
    assert "Nothing to show with these filters." in page.locator("#toy-last .plot").inner_text()


def test_a_link_of_the_contents_keeps_the_filters(visit):
    page = visit("toy", "#method=kril")
    page.get_by_role("link", name="Other runs: toy-rate").click()
    assert "method=kril" in page.url and "at=other-toy-rate" in page.url


# ------------------------------------------------------------------ numbers


def open_numbers(page: Any, selector: str) -> Any:
    numbers = show(page, selector).locator(".numbers")
    numbers.locator("summary").click()
    numbers.locator("table").last.wait_for()
    return numbers


def test_the_csv_holds_what_the_table_shows(visit):
    page = visit("toy", "#seed=0&seed=1")
    numbers = open_numbers(page, CURVES)
    with page.expect_download() as waiting:
        numbers.get_by_role("button", name="Download CSV").click()
    assert waiting.value.suggested_filename == "toy-curves.csv"
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    shown = numbers.locator("table").last.evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows == shown
    assert len(rows) == 1 + 3 * 5 + 2  # a head; three places of five runs; two numbers of the paper
    assert rows[0][:3] == ["series", "classes seen", "accuracy on all classes so far (%)"]
    assert set(rows[0]) >= {"seed", "commit", "date", "command", "source"}


def test_the_means_stand_beside_the_paper(visit):
    page = visit("toy")
    table = open_numbers(page, CURVES).locator("table").first
    rows = table.evaluate("table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))")
    assert rows[0] == ["series", "classes seen", "mean (%)", "± deviation", "runs", "the paper", "ours − paper"]
    assert ["KRIL", "8", "71.0", "1.0", "3", "66.0", "5.0"] in rows
    assert ["EWC", "8", "50.0", "one run", "1", "", ""] in rows


def test_tables_are_tables_for_a_screen_reader(visit):
    page = visit("toy")
    for table in open_numbers(page, CURVES).locator("table").all():
        assert table.locator("caption").count() == 1
        assert table.locator("thead th:not([scope=col])").count() == 0
        assert table.locator("tbody th[scope=row]").count() == table.locator("tbody tr").count()


def test_a_picture_has_a_name_that_sums_it_up(visit):
    page = visit("toy")
    show(page, CURVES)
    label = page.locator(f"{CURVES} svg[role=img]").get_attribute("aria-label")
    assert "Line plot of 4 series" in label and "KRIL: at the end 71.0 ± 1.0 %" in label


# ------------------------------------------------------------------ for everybody


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_axe_finds_nothing(visit, mode):
    from axe_playwright_python.sync_playwright import Axe

    page = visit("toy", color_scheme=mode)
    for name in page.locator("article.figure").evaluate_all("all => all.map(one => one.id)"):
        show(page, f"#{name}")
    open_numbers(page, CURVES)
    page.locator(".filter summary").first.click()
    hover(page, CURVES)
    page.mouse.move(1, 1)  # a tip that has come and gone is drawn anew
    page.wait_for_function("() => !/so far: \\d/.test(document.querySelector('#toy-curves svg').textContent)")
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_the_mode_follows_the_system_and_the_button_keeps_another(visit):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = visit("toy", color_scheme="dark")
    dark = background(page)
    button = page.get_by_role("button", name="Dark mode")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    light = background(page)
    assert light != dark and button.get_attribute("aria-pressed") == "false"
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert background(page) == light
    assert background(visit("toy", color_scheme="light")) == light


@pytest.mark.parametrize("name", ["toy", "whole", "hostile"])
def test_a_phone_scrolls_down_only(visit, name):
    page = visit(name, viewport=PHONE)
    for figure in page.locator("article.figure").evaluate_all("all => all.slice(0, 12).map(one => one.id)"):
        show(page, f"#{figure}")
    page.locator("article .numbers summary").first.click()
    page.locator("#left-out summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_everything_is_reached_by_the_keyboard(visit):
    page = visit("toy")
    page.wait_for_selector(f"{CURVES} .plot svg")
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                  const one = document.activeElement, style = getComputedStyle(one);
                  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
                  return [one.className || one.tagName, one.textContent.slice(0, 12), seen];
                }"""
            )
        )
        if page.evaluate("document.activeElement.matches('#toy-curves .numbers summary')"):
            page.keyboard.press("Enter")
        if page.evaluate("document.activeElement.matches('#toy-curves .scroll')"):
            break
    texts = [text for _, text, _ in reached]
    assert texts[0] == "Skip to the "
    for wanted in (
        "Data: all",
        "Method: all",
        "Seed: all",
        "Dark mode",
        "Toy recipe",
        "KRIL, paper ",
        "Numbers (23)",
        "Download CSV",
    ):
        assert any(text.startswith(wanted[:12]) for text in texts), wanted
    assert reached[-1][0] == "scroll"
    assert all(seen for _, _, seen in reached), [one for one in reached if not one[2]]


def test_a_hostile_row_runs_nothing_and_is_shown_as_text(visit):
    page = visit("hostile")
    for name in page.locator("article.figure").evaluate_all("all => all.map(one => one.id)"):
        show(page, f"#{name}")
        page.locator(f"#{name} .numbers summary").click()
    for summary in page.locator(".filter summary").all():
        summary.click()
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert "<script>" in page.locator("#left-out").text_content()
    assert "<script>" in page.locator("article .numbers").first.text_content()


def test_a_formula_in_a_row_is_text_for_a_spreadsheet(visit):
    page = visit("hostile")
    cells = page.evaluate("['=1+1', '+1', '@x', '-1+2', 'a\"b', 'plain', -1.5].map(csvCell)")
    assert cells == ["'=1+1", "'+1", "'@x", "'-1+2", '"a""b"', "plain", "-1.5"]


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_screenshot_is_kept_for_a_person(visit, tmp_path_factory, width, mode):
    folder = Path(os.environ.get("KRNET_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    page = visit("whole", color_scheme=mode, viewport={"width": width, "height": 900})
    show(page, "article.figure")
    path = folder / f"report-{width}-{mode}.png"
    page.screenshot(path=path)
    print(f"screenshot: {path}")
    assert path.stat().st_size > 10_000
