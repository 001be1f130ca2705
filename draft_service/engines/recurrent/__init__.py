"""The recurrent drafter: one decoder layer over the target's features that reads its own guesses back."""
