"""How each kind of drafter learns: the loss of one batch."""
