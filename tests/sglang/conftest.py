"""Real SGLang on a CPU: its ModelRunner in processes of its own, its Triton attention kernels interpreted."""

from __future__ import annotations

import os

import pytest
from treewire_sglang_platform import NAME
from treewire_sglang_platform.torchvision_schemas import define_schemas

_TIMEOUT_SECONDS = 900

os.environ.update(
    SGLANG_PLATFORM=NAME,
    SGLANG_CPU_OMP_THREADS_BIND="0|0",  # two ranks on a machine of one NUMA node
    TRITON_INTERPRET="1",
    OMP_NUM_THREADS="1",
)
define_schemas()  # before anything imports transformers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting ranks takes tens of seconds on a free machine, minutes on a busy one."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS))
