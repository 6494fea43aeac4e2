"""Which of transformers' auto classes loads a model that generates text."""

from __future__ import annotations

from typing import Any

__all__ = ["auto_class"]


def auto_class(config: Any) -> Any:
    """Return the auto class for a configuration: that of language models, or of others that generate text.

    Many models of text and images (Qwen2.5-VL, LLaVA, InternVL) are known to `AutoModelForMultimodalLM` only,
    although they read text alone as well. Encoder-decoder models that read text (T5, BART) may be known as
    language models too, without their encoders.

    Args:
        config (`PreTrainedConfig`): The model's, as `AutoConfig` loads it.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
    )

    kind = type(config)
    if getattr(config, "is_encoder_decoder", False) and kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return AutoModelForSeq2SeqLM
    is_multimodal = kind in MODEL_FOR_MULTIMODAL_LM_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_multimodal else AutoModelForCausalLM
