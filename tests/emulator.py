"""Kernels on a CPU: their source, compiled by g++ with cuda_shim.h in place of CUDA."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from krnet.nn.cuda import kernels

FAULTS = {1: "threads met at different barriers", 2: "wrote past its shared memory", 3: "copied to an odd address"}


def first_quick(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases for parametrize, of which all but the first are slow: each is compiled anew."""
    first, *others = cases
    return [first if len(first) > 1 else first[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


class Emulator:
    """In place of kernels.launch: compiles for the CPU, and runs every kernel in two orders (see cuda_shim.h)."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        self.folder, self.dtype = folder, dtype
        self.source = kernels.source()
        self.changed: dict[str, str] = {}  # the source of a kernel, where a test wants another
        self.built: dict[tuple, ctypes.CDLL] = {}
        self.names: set[str] = set()

    def library(self, name, constants):
        source = self.changed.get(name, self.source)
        key = (source, name, *constants.items())
        if key not in self.built:
            shim = Path(__file__).with_name("cuda_shim.h")
            target = self.folder / f"{len(self.built)}-{id(self)}.so"
            options = [f"-D{k}={v}" for k, v in constants.items()] + ["-DKRNET_FLOAT"] * (self.dtype == torch.float32)
            options += ["-DKRNET_ON_CPU", f"-D{name.upper()}", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
            subprocess.run(
                ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *options, "-x", "c++", "-", "-o", target],
                input=f'#include "{shim}"\n{source}\nENTRY({name})\n', text=True, check=True,
            )  # fmt: skip
            self.built[key] = ctypes.CDLL(str(target))
        return self.built[key]

    def __call__(self, name, constants, grid, threads, shared_bytes, args):
        library = self.library(name, constants)
        self.names.add(name)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
        values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else ctypes.c_int(a) for a in args]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        before, found = [t.detach().clone() for t in tensors], []
        for order in (0, 1):
            for tensor, value in zip(tensors, before, strict=True):
                tensor.data.copy_(value)  # a kernel may change what it reads; autograd need not know
            fault = library.run(*grid, threads, shared_bytes, order, pointers)
            assert fault == 0, f"{name}: {FAULTS.get(fault, 'larger than the emulator')}"
            found.append([t.detach().clone() for t in tensors])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9)), f"{name}: depends on the threads' order"
