"""The engine behind HTTP: OpenAI-compatible routes, streaming, limits and metrics."""
