"""Loading through transformers, from a folder or from any other source, with every weight accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from phloem.errors import ModelError

if TYPE_CHECKING:
    from .._source import ModelSource


def load(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Any:
    """A causal language model in eval mode. Raises ModelError if transformers cannot make one or weights lack."""
    from transformers import AutoConfig, AutoModelForCausalLM

    how = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
    try:
        if source.format == "safetensors":
            model, info = AutoModelForCausalLM.from_pretrained(source.path, local_files_only=True, **how)
        else:
            values = {key: value for key, value in source.config.items() if key != "model_type"}
            config = AutoConfig.for_model(source.config["model_type"], **values)
            kind = AutoModelForCausalLM._model_mapping[type(config)]
            weights = dict(source.tensors())
            model, info = kind.from_pretrained(None, config=config, state_dict=weights, **how)
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as error:
        raise ModelError(f"transformers cannot load {source.path}: {error}") from error
    _check(info, source.path)
    return model.to(device).eval().requires_grad_(False)


def _check(info: dict[str, Any], path: str) -> None:
    """Refuse what transformers fills with random numbers and only warns of. Superfluous tensors it may ignore."""
    problems = [f"missing tensor {name}" for name in sorted(info["missing_keys"])]
    problems += [f"{name} has a wrong shape" for name, *_ in sorted(info["mismatched_keys"])]
    problems += [str(message) for message in info.get("error_msgs") or ()]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise ModelError(
            f"the weights of {path} do not fit its config: " + "; ".join(problems[:5]) + more,
            hint="config.json and the weights must come from the same model",
        )
