"""This file is what torchvision wants to find when it is imported beside a CPU build of torch: two operator schemas."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # the schemas live as long as this object


def define_schemas() -> None:
    """Define them once, unless torchvision's own library of operators loads: one that is built for CUDA does not here."""
    global _library
    if _library is None and not _own_library_loads():
        _library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            _library.define(schema)


def _own_library_loads() -> bool:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        return False
    return True
