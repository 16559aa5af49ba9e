"""Whole numbers as codes, shared by recorders rotation and residual: entropy-coded, and read back as they are.

codes (N, columns) -> encode_codes -> tensors of the file -> code_reader -> codes, which check_codes checks
"""

from __future__ import annotations

import torch
from torch import Tensor

from krnet.coding.matrix import CodedConfig, CodedMatrix, Matrix, MatrixReader, MatrixStats, encode, measure
from krnet.errors import NotARecordingError
from krnet.io.archive import TensorStore
from krnet.io.header import RESTORE

CODES = "codes."  # prefix of the tensors that hold the codes


def code_config(block_size: int) -> CodedConfig:
    """A step of 1: whole numbers are coded without an error."""
    return CodedConfig(step=1.0, block_size=block_size)


def measure_codes(codes: Matrix, block_size: int, max_rows: int | None = None) -> MatrixStats:
    return measure(codes, code_config(block_size), max_rows=max_rows)


def encode_codes(codes: Matrix, block_size: int) -> dict[str, Tensor]:
    return encode(codes, code_config(block_size), measure_codes(codes, block_size)).tensors(CODES)


def code_reader(
    store: TensorStore, num_rows: int, num_columns: int, block_size: int, device: torch.device
) -> MatrixReader:
    coded = CodedMatrix.load(store, CODES, num_rows, num_columns, block_size)
    return MatrixReader(coded, code_config(block_size), device)


def check_codes(codes: Tensor, lowest: int, highest: int) -> Tensor:
    """The codes as int32; refused if one is out of range, which no recorder has written."""
    if codes.numel() and not lowest <= codes.min() <= codes.max() <= highest:
        raise NotARecordingError(
            f"codes from {codes.min():g} to {codes.max():g}; expected {lowest} to {highest}. {RESTORE}"
        )
    return codes.int()
