"""Model `native`: Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma 3 (text), LFM2 and Mamba-2 in plain torch."""

from .model import NativeModel

__all__ = ["NativeModel"]
