"""Where a model's keys and values live: pages of slots, cached prefixes, each session's rows, the tensors behind them."""
