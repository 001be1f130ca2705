"""Training of drafters: from prompts to shipped weights, for any target that transformers can run."""
