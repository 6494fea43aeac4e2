"""Small random encoder-decoder models of the families that Transformers has, and what they read."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.models import _initialise

VOCABULARY = 128
SOURCE, PADDED = 150, 117
"""Tokens of a batch's longer and shorter text, which fill two blocks and some."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "src_vocab_size": VOCABULARY,
    "tgt_vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "encoder_num_key_value_heads": 4,
    "decoder_num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "scale_embedding": False,
    # of some families
    "attention_window": 16,
    "block_size": 16,
    "local_radius": 15,
    "num_experts": 4,
    "langs": ["a", "b"],
    "speech_encoder_layers": 1,
    "speech_encoder_intermediate_size": 64,
    "t2u_encoder_layers": 1,
    "t2u_decoder_layers": 1,
    # of those that hear
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "num_conv_layers": 2,
    "conv_channels": 32,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
_GEMMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_BERT = {**_TOWER, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
_DECODER = {"is_decoder": True, "add_cross_attention": True}

READING: tuple[str, ...] = (
    "bart", "bert-bert", "bert-gpt2", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fsmt", "led",
    "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart",
    "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "t5gemma2", "umt5",
)  # fmt: skip
HEARING: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "moonshine": ("MoonshineForConditionalGeneration", {"input_values": (2, 56000)}),
    "speech_to_text": ("Speech2TextForConditionalGeneration", {"input_features": (2, 600, 8)}),
    "whisper": ("WhisperForConditionalGeneration", {"input_features": (2, 8, 3000)}),
}
"""Families that hear: their class, and the shape of what they hear."""
_CLASSES = {
    "seamless_m4t": "SeamlessM4TForTextToText",
    "seamless_m4t_v2": "SeamlessM4Tv2ForTextToText",
    **{name: class_name for name, (class_name, _) in HEARING.items()},
}


def encoder_decoder(name: str, **overrides: Any) -> PreTrainedModel:
    """Builds a small model of a family, in evaluation mode; `overrides` are fields of its configuration."""
    config = _configuration(name, overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in _CLASSES:
            model = getattr(transformers, _CLASSES[name])(config)
        else:
            model = AutoModelForSeq2SeqLM.from_config(config)
    _initialise(model, 1)
    model.generation_config.decoder_start_token_id = 1
    return model.eval()


def _configuration(name: str, overrides: dict[str, Any]) -> Any:
    if name == "t5gemma":
        sides = {"encoder": dict(_GEMMA), "decoder": dict(_GEMMA)}
        return CONFIG_MAPPING[name](**sides, vocab_size=VOCABULARY, pad_token_id=0)
    if name == "t5gemma2":
        encoder = {
            "text_config": dict(_GEMMA),
            "vision_config": {**_TOWER, "image_size": 16, "patch_size": 8},
        }
        return CONFIG_MAPPING[name](
            encoder=encoder, decoder=dict(_GEMMA), image_token_index=127, eoi_token_index=126
        )
    if "-" in name and name.split("-")[0] == "bert":
        of_decoder = {"bert": _BERT, "gpt2": _GPT2}[name.split("-")[1]]
        decoder = CONFIG_MAPPING[name.split("-")[1]](**of_decoder, **_DECODER)
        config = CONFIG_MAPPING["encoder-decoder"].from_encoder_decoder_configs(
            CONFIG_MAPPING["bert"](**_BERT), decoder
        )
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return config
    config_class = CONFIG_MAPPING[name]
    fields = set(inspect.signature(config_class).parameters)
    aliases: dict[str, str] = getattr(config_class, "attribute_map", {})
    sizes = {aliases.get(key, key): value for key, value in _SIZES.items() if aliases.get(key, key) in fields}
    return config_class(**sizes | overrides)


def source(name: str, rows: tuple[int, ...] = (SOURCE, PADDED)) -> dict[str, Tensor]:
    """What a model is to read: a batch of texts, padded on the right, or of sounds."""
    generator = torch.Generator().manual_seed(0)
    if name in HEARING:
        heard = {key: torch.randn(shape, generator=generator) for key, shape in HEARING[name][1].items()}
        if name == "speech_to_text":
            heard["attention_mask"] = torch.ones(heard["input_features"].shape[:2], dtype=torch.long)
        return heard
    tokens = torch.randint(5, 120, (len(rows), max(rows)), generator=generator)
    mask = torch.arange(max(rows))[None] < torch.tensor(rows)[:, None]
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}


def target(count: int, rows: int = 2) -> Tensor:
    """Tokens of the decoder."""
    return torch.randint(5, 120, (rows, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decoded(model: Any, given: dict[str, Tensor], cache: Any, tokens: Tensor, parts: list[int]) -> Tensor:
    """Logits `(B, T, V)` of `tokens`, given to the decoder in calls of `parts` tokens with one cache."""
    encoded = model.get_encoder()(**given)
    beside = {name: given[name] for name in ("attention_mask",) if name in given}
    logits = [
        model(
            encoder_outputs=encoded, decoder_input_ids=part, **beside, **as_argument(cache), use_cache=True
        ).logits
        for part in tokens.split(parts, dim=1)
    ]
    return torch.cat(logits, dim=1)
