"""Model `native`: Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma 3 (text) and LFM2 in a few hundred lines of torch."""

from .model import NativeModel

__all__ = ["NativeModel"]
