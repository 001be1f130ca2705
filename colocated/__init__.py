"""The co-located mode: draft service, verify service and gateway in one process, without a wire between them."""
