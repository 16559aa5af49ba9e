"""The page as text: whole, without a way out for what rows hold. How it behaves: test_browser.py."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from krnet.errors import InputError
from krnet.io import ledger
from krnet.report import page, pictures
from krnet.report.figures import COLOURS as OLD_COLOURS
from krnet.report.sections import make_report
from krnet.report.spread import summarize
from krnet.report.write import write_report
from report.rows import HOSTILE, hostile, toy_rows

LEDGER = Path(__file__).parents[2] / "results" / "ledger.jsonl"
VOID = {"meta", "link", "input", "br", "img", "hr"}
MAX_PAGE_BYTES = 3_000_000


class Parsed(HTMLParser):
    """Elements, ids, and the text of scripts, of a page whose elements close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


def render(rows):
    return page.render_page(make_report("Toy <results>", "All & more.", rows))


@pytest.fixture(scope="module")
def whole():
    return render(ledger.read(LEDGER))


def test_the_page_of_the_whole_ledger_is_well_formed_and_small(whole):
    parsed = Parsed(whole)
    ids = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"][1:] for tag, attrs in parsed.elements if tag == "a"]
    assert set(links) <= set(ids)
    assert len(whole.encode()) < MAX_PAGE_BYTES


def test_the_page_loads_nothing(whole):
    for tag, attrs in Parsed(whole).elements:
        assert "src" not in attrs and tag not in ("iframe", "object", "embed", "base")
        assert tag != "link" or attrs["href"] == "data:,"
    assert "url(" not in page._read("assets", "page.css") and "@import" not in page._read("assets", "page.css")


def test_every_script_is_one_whose_digest_the_policy_lists(whole):
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', whole)[1]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    scripts = Parsed(whole).scripts[1:]  # the first holds the numbers
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']*)'", policy) == digests
    assert len(digests) == len(page.LIBRARIES) + len(page.SCRIPTS)


def test_a_hostile_row_adds_no_element():
    def tags(text):
        return [tag for tag, _ in Parsed(text).elements if tag in ("script", "img")]

    assert tags(render([*toy_rows(), hostile(), {**hostile(), "outcome": HOSTILE}])) == tags(render(toy_rows()))


def test_numbers_cannot_end_their_element():
    text = page.embed_json({"a": HOSTILE + "<!--\u2028&"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": HOSTILE + "<!--\u2028&"}


def test_titles_are_escaped():
    assert "<h1>Toy &lt;results&gt;</h1>" in render(toy_rows())


def test_points_name_their_run_by_its_place():
    packed = page.pack(make_report("t", "", toy_rows()))
    figures = [figure for section in packed["sections"] for figure in section["figures"]]
    (curves,) = [figure for figure in figures if figure["name"].endswith("curves")]
    series, x, y, source, label, run = curves["points"][0]
    assert (curves["series"][series], x, y, source, curves["labels"][label]) == ("kril", 4, 90.0, 0, "")
    assert dict(zip(page.RUN_FIELDS, packed["runs"][run]))["command"] == "krnet learn kril"


def test_the_script_reads_the_fields_in_the_order_they_are_written():
    text = page._read("assets", "numbers.js")
    assert json.loads(re.search(r"RUN_FIELDS = (\[[^\]]*\])", text)[1]) == list(page.RUN_FIELDS)


def test_every_library_has_its_licence_in_the_page(whole):
    for licences in page.LIBRARIES.values():
        for licence in licences:
            assert page._read("vendor", licence).splitlines()[0] in whole


def test_a_page_without_rows_says_so():
    assert "No row holds anything that a figure shows." in render([])


def test_the_deviation_is_that_of_a_sample():
    found = summarize("a", [1.0, 2.0, 4.0])
    assert (found.mean, round(found.deviation, 6)) == (7 / 3, 1.527525)
    assert summarize("a", [1.0]).deviation is None


# ------------------------------------------------------------------ colours


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_and_series_stand_out_in_both_modes():
    css = page._read("assets", "page.css")
    light, by_system, dark = (colours(block) for block in re.findall(r":root[^{]*\{([^}]*--paper[^}]*)\}", css))
    assert by_system == dark
    for mode in (light, dark):
        for name in ("ink", "soft", "accent"):
            assert min(contrast(mode[name], mode["paper"]), contrast(mode[name], mode["sheet"])) >= 4.5
        for number in range(8):
            assert contrast(mode[f"s{number}"], mode["paper"]) >= 4.5


def test_pictures_have_the_colours_of_the_page():
    light = colours(re.search(r":root \{([^}]*)\}", page._read("assets", "page.css"))[1])
    assert [light[f"s{number}"] for number in range(8)] == list(pictures.COLOURS)
    assert OLD_COLOURS  # krnet.report.figures is still there


# ------------------------------------------------------------------ files


def test_a_report_and_its_pictures_are_written(tmp_path):
    report = write_report(tmp_path / "r.html", toy_rows(), [tmp_path / "l.jsonl"], pictures=tmp_path / "pictures")
    names = {figure.name for section in report.sections for figure in section.figures}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("png", "svg")
    }
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_equal_figures_are_equal_pictures(tmp_path):
    figure = make_report("t", "", toy_rows()).sections[0].figures[0]
    made = [pictures.write_pictures(figure, tmp_path / name)[1].read_bytes() for name in ("a", "b")]
    assert made[0] == made[1]


def test_text_of_a_row_is_no_formula_in_a_picture(tmp_path):
    rows = [{**row, "metrics": {**row["metrics"], "method": r"$\frac{"}} for row in toy_rows()[:3]]
    for figure in make_report("t", "", rows).sections[0].figures:
        pictures.write_pictures(figure, tmp_path)


def test_a_ledger_is_not_overwritten_by_its_page(tmp_path):
    with pytest.raises(InputError, match="would be overwritten"):
        write_report(tmp_path / "l.jsonl", [], [tmp_path / "l.jsonl"])
