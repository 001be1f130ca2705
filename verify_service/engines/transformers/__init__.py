"""The embedded target engine: any causal language model of transformers, with tree attention over our KV store."""

from verify_service.engines.transformers.engine import TransformersTarget

__all__ = ["TransformersTarget"]
