"""Work plan: the numbers of the storage table, and what its settings may not be."""

from __future__ import annotations

from typing import Any

import pytest

from krnet.errors import SettingError
from krnet.io import ledger
from krnet.reproduce.works.base import Place, get_work
from krnet.reproduce.works.plan import even_counts

GOOD: dict[str, Any] = {
    "shape": [256, 14, 14],
    "preset": "imagenet-published",
    "samples": {"50": 64817, "250": 319811},
    "quantity": "krnet_code_bytes",
}


def test_both_works_are_registered_and_an_unknown_one_names_the_nearest():
    assert [get_work(name).name for name in ("learn", "plan")] == ["learn", "plan"]
    with pytest.raises(SettingError, match=r"unknown work 'plans'; did you mean 'plan'\?"):
        get_work("plans")


def test_a_row_holds_the_quantity_for_each_number_of_classes(tmp_path, monkeypatch):
    monkeypatch.setenv("KRNET_LEDGER", str(tmp_path / "ledger.jsonl"))
    work = get_work("plan")
    place = Place(folder=tmp_path, shared=tmp_path, data_dir=None, device=None, watch=None)
    row = work.perform("some", GOOD, 0, place)
    assert [row] == ledger.read() and row["seed"] is None
    assert row["metrics"]["values"] == {"50": 2 * 150 * 512 * 4, "250": 2 * 750 * 512 * 4}
    assert work.value(row, "50", "MB") == 2 * 150 * 512 * 4 / 2**20
    assert work.value(row) == row["metrics"]["values"]["250"]
    assert work.value(row, "100", "MB") is None and work.value(row, "50", "%") is None
    assert work.matches(row, GOOD, 0) and work.matches(row, GOOD, 7)
    assert not work.matches(row, {**GOOD, "quantity": "feature_bytes"}, 0)
    assert not work.matches({**row, "outcome": "failed"}, GOOD, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"quantity": "krnet_code_byte"}, r"unknown quantity 'krnet_code_byte'; did you mean 'krnet_code_bytes'\?"),
        ({"samples": {}}, r"samples is {}; expected samples by number of classes, such as { 50 = 64817 }"),
        ({"samples": {"50": 64817, "x": 3}}, r"samples holds 'x'; expected a number of classes"),
        ({"samples": {"50": 64817, "60": 59}}, r"samples is 59; expected at least 60"),
        ({"preset": "imagnet"}, r"preset is 'imagnet'|unknown preset 'imagnet'"),
        ({"setting": 3}, r"unknown setting 'setting'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_computed(changed, message):
    with pytest.raises(SettingError, match=message):
        get_work("plan").check({**GOOD, **changed})
    with pytest.raises(SettingError, match="shape is missing; expected shape, samples, quantity"):
        get_work("plan").check({name: value for name, value in GOOD.items() if name != "shape"})


def test_samples_are_shared_out_evenly():
    assert even_counts(10, 4) == [3, 3, 2, 2] and even_counts(8, 4) == [2] * 4
