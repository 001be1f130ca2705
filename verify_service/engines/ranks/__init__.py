"""Ranks: the processes that hold one target together, as their parent and as they themselves see them."""
