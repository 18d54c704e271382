"""Model `native`: Llama, SmolLM, Mistral, Qwen2, Qwen3 and Gemma 3 (text) in a few hundred lines of torch."""

from .model import NativeModel

__all__ = ["NativeModel"]
