"""Where programs run: an engine of this process, a phloem server, any OpenAI-compatible server."""
