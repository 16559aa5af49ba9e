"""Symbols are coded by the tables of other rows, those that the tables lack, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krnet.coding.entropy import FREQUENCY_BITS, MAX_ALPHABET, MAX_SYMBOL, Tables
from krnet.coding.open_tables import OpenTables
from krnet.errors import NotARecordingError

COLUMN = np.array([0, 1, 0, 2, 1, 3])
COUNTS = np.array([[1, 90, 3, 0, 0], [0, 10, 40, 30, 5], [0, 0, 7, 0, 0], [9, 9, 9, 9, 9]])  # of symbols -1 .. 3


@pytest.fixture(scope="module")
def tables() -> Tables:
    return Tables.from_counts(COLUMN, COUNTS, -1)


def through(tables: Tables, symbols: np.ndarray, block_size: int) -> tuple[np.ndarray, int]:
    """Symbols that were encoded and decoded, and the bytes that they took."""
    opened = OpenTables.of(tables)
    streams = list(opened.encode(symbols, block_size))
    sizes = [min(block_size, len(symbols) - begin) for begin in range(0, len(symbols), block_size)]
    return np.concatenate(list(map(opened.decode, streams, sizes))), sum(map(len, streams))


def known(tables: Tables, num_rows: int) -> np.ndarray:
    """Rows of symbols that the tables have, as frequent as they say."""
    random = np.random.default_rng(0)
    chances = COUNTS / COUNTS.sum(1, keepdims=True)
    return np.stack([random.choice(5, num_rows, p=chances[table]) - 1 for table in COLUMN], axis=1)


@settings(max_examples=40)
@given(
    symbols=st.lists(st.lists(st.integers(-MAX_SYMBOL, MAX_SYMBOL), min_size=6, max_size=6), min_size=1, max_size=9),
    block_size=st.integers(1, 5),
)
def test_any_symbols_come_back(tables, symbols, block_size):
    symbols = np.array(symbols)
    assert np.array_equal(through(tables, symbols, block_size)[0], symbols)


def test_known_symbols_take_as_many_bytes_as_with_the_tables_themselves(tables):
    symbols = known(tables, 5000)
    found, num_bytes = through(tables, symbols, 100)
    own_bytes = sum(map(len, tables.encode(symbols, 100)))
    assert np.array_equal(found, symbols) and own_bytes <= num_bytes < 1.005 * own_bytes


def test_an_unknown_symbol_takes_four_bytes(tables):
    symbols = known(tables, 1000)
    own_bytes = through(tables, symbols, 100)[1]
    symbols[::10, 0] = 400
    assert abs(through(tables, symbols, 100)[1] - own_bytes - 100 * 28 / 8) < 40


def test_bits_are_those_that_the_streams_take(tables):
    symbols = known(tables, 4000)
    symbols[::100, 2] = -300
    opened = OpenTables.of(tables)
    found = float(opened.bits(torch.from_numpy(symbols)).sum())
    assert abs(found / 8 - through(tables, symbols, 4000)[1]) < 8
    assert abs(opened.bits(torch.from_numpy(known(tables, 4000))).mean() / opened.mean_bits - 1) < 0.02


@pytest.mark.parametrize("num_symbols", [1, 2, MAX_ALPHABET])
def test_frequencies_still_add_up(num_symbols):
    tables = Tables.from_counts(np.array([0]), np.ones((1, num_symbols)), 0)
    opened = OpenTables.of(tables).tables
    assert (opened.weights.astype(int) + 1).sum() == 2**FREQUENCY_BITS and len(opened.weights) == num_symbols + 1
    symbols = np.array([[0], [num_symbols - 1], [num_symbols], [-1]])
    assert np.array_equal(through(tables, symbols, 4)[0], symbols)


def test_a_stream_of_other_rows_is_refused(tables):
    opened = OpenTables.of(tables)
    (stream,) = opened.encode(known(tables, 50), 50)
    with pytest.raises(NotARecordingError, match="goes on after its 20 rows"):
        opened.decode(stream, 20)
