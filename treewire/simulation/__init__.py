"""This package is the trace simulator: recorded rounds of a real drafter and target, replayed in virtual time against other
prices, networks and loads. Recording: `recorder`. Replay: `simulator`."""
