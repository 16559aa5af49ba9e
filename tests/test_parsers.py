"""What a user types becomes the value meant, or a message."""

from collections.abc import Callable
from pathlib import Path

import pytest

from krnet.config import (
    parse_counts,
    parse_duration,
    parse_first_id,
    parse_ids,
    parse_names,
    parse_seeds,
    parse_setting,
    parse_shape,
    parse_share,
    parse_targets,
)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_shape, "256,14,14", (256, 14, 14)),
        (parse_shape, "256x14x14", (256, 14, 14)),
        (parse_shape, "512", (512,)),
        (parse_counts, "1300,1300,732", [1300, 1300, 732]),
        (parse_counts, "500x3", [500, 500, 500]),
        (parse_first_id, "50000", 50000),
        (parse_first_id, "end", "end"),
        (parse_share, "0/1", (0, 1)),
        (parse_share, " 3 / 8", (3, 8)),
        (parse_counts, "500x2,7", [500, 500, 7]),
        (parse_seeds, "0,2,1", [0, 2, 1]),
        (parse_names, "lucir1993, icarl", ["lucir1993", "icarl"]),
        (parse_duration, "90", 90.0),
        (parse_duration, "90s", 90.0),
        (parse_duration, "10m", 600.0),
        (parse_duration, "1h30m", 5400.0),
        (parse_duration, "1.5h", 5400.0),
        (parse_setting, "c0=64", ("c0", 64)),
        (parse_setting, "lr=1e-3", ("lr", 0.001)),
        (parse_setting, "compile=false", ("compile", False)),
        (parse_setting, "only_last=True", ("only_last", True)),
        (parse_setting, "bits=none", ("bits", None)),
        (parse_setting, "conv_after=full", ("conv_after", "full")),
        (parse_setting, "drops=0.5,1", ("drops", (0.5, 1))),
        (parse_setting, "recorder_settings=d0=8,c0=4", ("recorder_settings", "d0=8,c0=4")),
        (parse_setting, "order=1,two", ("order", "1,two")),
        (parse_targets, "0.95,0.98,1", (0.95, 0.98, 1.0)),
        (parse_targets, "", ()),
        (parse_ids, "5", [5]),
        (parse_ids, "-1", [-1]),
        (parse_ids, "0:100", [slice(0, 100)]),
        (parse_ids, "::10", [slice(None, None, 10)]),
        (parse_ids, "5,3, 7:9", [5, 3, slice(7, 9)]),
        (parse_ids, "@some/ids.npy", Path("some/ids.npy")),
    ],
)
def test_typed_text_becomes_its_value(parse: Callable[[str], object], text: str, value: object) -> None:
    found = parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_shape, text) for text in ("", "a", "3,", "-3", "3.5")),
        *((parse_counts, text) for text in ("", "x5", "5x", "5,,5", "-5")),
        *((parse_seeds, text) for text in ("", "1,", "-1", "1.5", "one", "1,2,1")),
        *((parse_names, text) for text in ("", "a,", "a,a")),
        *((parse_duration, text) for text in ("", "-5", "m", "5y", "nan", "inf")),
        *((parse_setting, text) for text in ("", "c0", "=5")),
        *((parse_targets, text) for text in ("x", "0.9,", "1.1", "nan")),
        *((parse_ids, text) for text in ("", "a", "1,", "1:2:0", "1:2:3:4", "1.5")),
    ],
)
def test_nonsense_is_refused_with_what_was_typed(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        parse(text)
