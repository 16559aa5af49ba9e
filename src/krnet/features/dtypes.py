"""The types that features may have, by name."""

from __future__ import annotations

import torch

# Names of the supported types: safetensors -> numpy and torch. uint16 is left out on purpose: it often holds the bits
# of bfloat16 values, which are wrong as integers.
SAFETENSORS_DTYPES = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SAFETENSORS_DTYPES.values()}
