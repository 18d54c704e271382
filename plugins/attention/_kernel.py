"""The compiled attention kernel: its functions, and the structure in which it is told of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from phloem.kernels import load

from ._jobs import Jobs

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of what is stored, as the kernel numbers them
_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Plan(ctypes.Structure):
    """`Plan` of paged.cpp, field by field. `keep` holds what the pointers point to."""

    _fields_ = (
        *(("table", _POINTER), ("width", _INT64), ("slots", _POINTER), ("tokens", _INT64)),
        *(("jobs", _POINTER), ("jobs_count", _INT64), ("members", _POINTER)),
        *(("queries", _POINTER), ("masks", _POINTER)),
        *(("merged", _POINTER), ("begins", _POINTER), ("parts", _POINTER), ("merged_count", _INT64)),
        *((name, _INT64) for name in ("heads", "kv_heads", "k_dim", "v_dim", "kind")),
        *(("states", _POINTER), ("scratch", _POINTER)),
        *((name, _INT64) for name in ("scratch_each", "threads", "rows")),
    )
    keep: tuple[object, ...]


class Buffer:
    """Memory that is kept from step to step and grows with them: fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self._floats = torch.empty(0)

    def of(self, floats: int) -> torch.Tensor:
        """At least so many floats of any value, aligned as vectors want to be."""
        if len(self._floats) < floats:
            self._floats = torch.empty(floats + floats // 4)
        return self._floats


class Kernel:
    """The functions of paged.cpp. One per plugin instance, whose steps run one after the other.

    Raises PluginError where they cannot be compiled.
    """

    def __init__(self) -> None:
        library = load(Path(__file__).with_name("paged.cpp"))
        for name, count in (("phloem_span", 0), ("phloem_state_floats", 1), ("phloem_scratch_floats", 3)):
            function = getattr(library, name)
            function.restype, function.argtypes = _INT64, (_INT64,) * count
        self._library = library
        self.threads: Callable[[], int] = torch.get_num_threads  # asked once per step
        self.span: int = library.phloem_span()
        self._states, self._scratch = Buffer(), Buffer()
        self.attend = library.phloem_attend
        self.attend.restype = None
        self.attend.argtypes = (
            *(_POINTER, _POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT64),
            *(_POINTER, _POINTER, _POINTER, _FLOAT, _FLOAT),
        )

    def plan(
        self,
        jobs: Jobs,
        table: npt.NDArray[np.int32],
        slots: torch.Tensor,
        heads: tuple[int, int],
        widths: tuple[int, int],
        dtype: torch.dtype,
    ) -> Plan:
        """For all layers with this table [S, max_kv], `slots` [T] int64, query and KV heads, and widths of K and V."""
        threads = self.threads()
        rows = jobs.most * heads[0] // heads[1]
        each = self._library.phloem_scratch_floats(rows, *widths)
        scratch = self._scratch.of(threads * each)
        states = self._states.of(len(jobs.parts) * heads[0] * self._library.phloem_state_floats(widths[1]))
        arrays = [np.ascontiguousarray(array) for array in (table, *jobs)]
        where = dict(zip(("table", *Jobs._fields), (array.ctypes.data for array in arrays), strict=True))
        plan = Plan(
            **where, width=table.shape[1], slots=slots.data_ptr(), tokens=len(slots), jobs_count=len(jobs.jobs),
            merged_count=len(jobs.merged), heads=heads[0], kv_heads=heads[1], k_dim=widths[0], v_dim=widths[1],
            kind=KINDS[dtype], states=states.data_ptr(), scratch=scratch.data_ptr(), scratch_each=each,
            threads=threads, rows=rows,
        )  # fmt: skip
        plan.keep = (arrays, slots, states, scratch)
        return plan
