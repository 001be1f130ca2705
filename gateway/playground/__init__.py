"""The playground: one page for a conversation, and beside it what happened in every round."""
