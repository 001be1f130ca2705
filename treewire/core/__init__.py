"""The pure core: trees, their building, visibility, noise and acceptance. No I/O, no clock, no asyncio, no torch."""
