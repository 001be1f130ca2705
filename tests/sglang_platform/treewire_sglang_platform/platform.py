"""This file is the platform: a CPU whose layers are SGLang's own torch forwards and whose attention is Triton, interpreted."""

from __future__ import annotations

import os

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


class TestCpuPlatform(CpuSRTPlatform):
    """A CPU without `sgl_kernel`. Graphs do not exist here; run it with TRITON_INTERPRET=1."""

    __test__ = False  # not a class of tests, whatever its name

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """SGLang's Triton kernels, interpreted."""
        return "triton"

    def get_dispatch_key_name(self) -> str:
        """The layers' forwards in plain torch."""
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Ours is registered as one."""
        return True

    def init_backend(self) -> None:
        """Called once SGLang's registries exist. With TREEWIRE_TEST_ATTENTION=sdpa attention is torch's, not Triton's."""
        if os.environ.get("TREEWIRE_TEST_ATTENTION") == "sdpa":
            from treewire_sglang_platform.sdpa import replace_triton

            replace_triton()
