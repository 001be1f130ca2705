"""SGLang's out-of-tree platform for treewire's tests: its ModelRunner on a CPU, with no CUDA kernel and no `sgl_kernel`.

SGLang finds it by entry point. It answers only if SGLANG_PLATFORM names it, so that it is never active by being installed.
"""

from __future__ import annotations

import os

NAME = "treewire_test_cpu"


def activate() -> str | None:
    """The platform's class path for SGLang, or None, which keeps it out, unless SGLANG_PLATFORM asks for it by name."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    from treewire_sglang_platform.torchvision_schemas import define_schemas

    define_schemas()
    return "treewire_sglang_platform.platform.TestCpuPlatform"
