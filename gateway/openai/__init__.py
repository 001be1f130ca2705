"""The gateway over HTTP, as clients of OpenAI's API expect it."""
