"""results/paper.csv against the tables of the paper, copied from its source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from krnet.errors import InputError
from krnet.report.figure import PaperNumber
from krnet.report.published import COLUMNS, read_published
from krnet.reproduce.recipe import read_recipe, recipe_names

NUMBERS = read_published()

STORAGE = r"""
 50 & 64,817   & 12.12 GB  &253.19 MB  & 0.59 MB \\
100 & 129,395  & 24.19 GB  &505.45 MB  & 1.17 MB \\
150 & 194,217  & 36.30 GB  &758.66 MB  & 1.76 MB \\
200 & 255,224  & 47.71 GB  &996.97 MB  & 2.34 MB \\
250 & 319,811  & 59.78 GB  &  1.22 GB  & 2.93 MB \\ \bottomrule
"""
L_AUX = r"""
1 & 72.40 & 72.31  &  6   & 61.00   &  61.39\\
2 & 69.15 & 69.08  &  7   & 60.04   &  59.88\\
3 & 67.26 & 67.10  &  8   & 57.88   &  57.74\\
4 & 64.63 & 64.41  &  9   & 55.73   &  54.95\\
5 & 63.29 & 63.15  &  10  & 55.21   &  53.80\\ \bottomrule
"""
L_KR2 = r"""
1 & 72.40 & 72.24  &  6   & 61.00   &  61.14\\
2 & 69.15 & 69.19  &  7   & 60.04   &  59.81\\
3 & 67.26 & 67.25  &  8   & 57.88   &  57.54\\
4 & 64.63 & 64.27  &  9   & 55.73   &  55.63\\
5 & 63.29 & 63.16  &  10  & 55.21   &  54.64\\ \bottomrule
"""
LAYERS = r"""
1 & 72.12  & 72.53  &72.09  & 71.76 \\
2 & 68.82  & 68.65  &68.85  & 68.68 \\
3 & 66.63  & 66.62  &66.74  & 66.28 \\
4 & 64.86  & 64.24  &64.26  & 64.39 \\
5 & 64.08  & 63.88  &63.56  & 63.67 \\
6 & 62.39  & 62.50  &59.77  & 59.82 \\
7 & 61.14  & 59.84  &58.59  & 58.35 \\
8 & 59.62  & 58.30  &56.40  & 56.08 \\
9 & 57.74  & 56.20  &54.73  & 54.21 \\
10& 56.87  & 54.09  &53.22  & 52.88 \\ \bottomrule
"""
# (recipe, series, x, value, unit): the numbers of the text.
TEXT = [
    ("storage-table", "autoencoder, weights", "", 325.8, "MB"),
    ("storage-table", "KRNet, weights", "", 327.9, "MB"),
    ("storage-table", "compression ratio", "50", 36, "x"),
    ("storage-table", "compression ratio", "250", 180, "x"),
    ("storage-table", "codes, autoencoder over KRNet", "", 400, "x"),
    ("reconstruction", "KRNet", "", 4.63e-4, "MSE"),
    ("reconstruction", "autoencoder", "", 6.65e-4, "MSE"),
    ("reconstruction", "zeros, CIFAR-100", "", 21, "%"),
    ("reconstruction", "zeros, ImageNet-Subset", "", 63, "%"),
    ("cifar100-10", "KRIL", "10", 55.21, "%"),
    ("cifar100-10", "GFR", "10", 48.9, "%"),
    ("cifar100-10", "KRIL minus GFR", "10", 6.3, "points"),
    ("upper-bound", "KRIL", "10", 55.21, "%"),
    ("upper-bound", "real features", "10", 56.87, "%"),
    ("imagenet-subset-10", "KRIL", "10", 63.92, "%"),
    ("imagenet-subset-10", "real features", "10", 70.58, "%"),
    ("single-vs-double", "two minus one, 10 tasks", "10", 1, "points"),
    ("aux-loss", "gain of L_aux", "9", 0.8, "points"),
    ("aux-loss", "gain of L_aux", "10", 1.4, "points"),
]


def cells(table: str) -> list[list[str]]:
    rows = [line.split("\\\\")[0].split("&") for line in table.strip().splitlines()]
    return [[cell.strip() for cell in row] for row in rows]


def values(recipe: str, series: str) -> dict[str, tuple[float, str]]:
    return {n.x: (n.value, n.unit) for n in NUMBERS if (n.recipe, n.series) == (recipe, series)}


def curve(table: str, column: int) -> dict[str, tuple[float, str]]:
    """A column of a table with tasks; the tables of the losses have tasks 6 to 10 beside 1 to 5."""
    found = {}
    for row in cells(table):
        for start in range(0, len(row), 3 if len(row) == 6 else len(row)):
            found[row[start]] = (float(row[start + column]), "%")
    return found


def test_the_storage_table_is_in_it():
    def with_unit(text: str) -> tuple[float, str]:
        number, unit = text.split()
        return float(number), unit

    rows = cells(STORAGE)
    assert values("storage-table", "samples") == {r[0]: (float(r[1].replace(",", "")), "samples") for r in rows}
    for column, series in enumerate(("raw features", "autoencoder, codes", "KRNet, codes"), 2):
        assert values("storage-table", series) == {row[0]: with_unit(row[column]) for row in rows}


def test_the_tables_of_the_losses_are_in_it():
    assert values("aux-loss", "with L_aux") == curve(L_AUX, 1) and values("aux-loss", "without L_aux") == curve(
        L_AUX, 2
    )
    assert values("kr2-loss", "with L_kr2") == curve(L_KR2, 1) and values("kr2-loss", "without L_kr2") == curve(
        L_KR2, 2
    )


def test_the_table_of_fixed_layers_is_in_it():
    for column, layers in enumerate((23, 25, 27, 29), 1):
        assert values("fixed-layers", f"{layers} fixed layers") == curve(LAYERS, column)


def test_a_curve_serves_every_recipe_that_shows_it():
    for recipe, series in (("cifar100-10", "KRIL"), ("upper-bound", "KRIL")):
        assert values(recipe, series) == curve(L_AUX, 1)
    assert values("single-vs-double", "two recordings, 10 tasks") == curve(L_AUX, 1)
    assert values("upper-bound", "real features") == curve(LAYERS, 1)


@pytest.mark.parametrize(("recipe", "series", "x", "value", "unit"), TEXT)
def test_the_numbers_of_the_text_are_in_it(recipe, series, x, value, unit):
    assert values(recipe, series)[x] == (value, unit)


def test_nothing_else_is_in_it_and_every_number_says_where_it_stands():
    tables = {(n.recipe, n.series) for n in NUMBERS if n.place.startswith("Table")}
    texts = {(recipe, series) for recipe, series, *_ in TEXT}
    assert {(n.recipe, n.series) for n in NUMBERS} == tables | texts
    for number in NUMBERS:
        assert re.search(r"Tables? [IV]+|Section IV-[ABC]\d|Appendix A\d", number.place), number
        assert number.reading_error is None  # the source has no pictures of its figures: nothing was read off
    keys = [(n.recipe, n.series, n.x) for n in NUMBERS]
    assert len(keys) == len(set(keys))


def test_curves_of_the_paper_belong_to_runs_of_their_recipe():
    """A run of another name would stand beside no number of the paper."""
    names = set(recipe_names())
    for recipe in {n.recipe for n in NUMBERS} & names:
        runs = {run.name for run in read_recipe(recipe).runs}
        curves = {n.series for n in NUMBERS if n.recipe == recipe and n.unit == "%" and n.x}
        assert curves <= runs


def test_a_number_of_a_file_is_read_with_its_reading_error(tmp_path):
    path = tmp_path / "paper.csv"
    path.write_text(",".join(COLUMNS) + '\na,"KRIL, own",3,61.5,%,Fig. 5 (b),0.4\n')
    expected = PaperNumber(
        recipe="a", series="KRIL, own", x="3", value=61.5, unit="%", place="Fig. 5 (b)", reading_error=0.4
    )
    assert read_published(path) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with nothing; expected the line recipe,series"),
        ("recipe,value\n", "begins with recipe,value; expected"),
        (",".join(COLUMNS) + "\na,b,1,x,%,c,\n", r"line 2: value is 'x'; expected a number"),
        (",".join(COLUMNS) + "\na,b,1,nan,%,c,\n", r"line 2: value is 'nan'"),
        (",".join(COLUMNS) + "\na,b,1,3,%,c,wide\n", r"line 2: reading_error is 'wide'"),
        (",".join(COLUMNS) + "\na,b,1,3,%,,\n", r"line 2: place is empty"),
        (",".join(COLUMNS) + "\na,b,1\n", r"line 2: has 3 columns; expected 7"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "paper.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_published(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_published(tmp_path / "missing.csv")
