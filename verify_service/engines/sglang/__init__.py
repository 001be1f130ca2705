"""The target engine on SGLang, for models that need it: mixtures of experts, latent attention, many GPUs."""

from verify_service.engines.sglang.engine import SglangTarget, StartedSglang
from verify_service.engines.sglang.options import SglangOptions

__all__ = ["SglangOptions", "SglangTarget", "StartedSglang"]
