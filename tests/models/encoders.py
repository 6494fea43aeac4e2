"""Small random encoder-decoder models of the families that Transformers has, and what they read."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.testing.models import _initialize

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
_BERT = {
    **_TOWER,
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
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
_VIT = {**_TOWER, "hidden_size": 64, "num_attention_heads": 4, "image_size": 64, "patch_size": 4}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_WAVES = {
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_DIA: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
}
_MUSIC: dict[str, Any] = {
    "text_encoder": {**_T5, "model_type": "t5"},
    "audio_encoder": {
        "model_type": "encodec",
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_size": 32,
        "codebook_dim": 16,
        "num_lstm_layers": 1,
    },
    "decoder": {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "num_codebooks": 4,
        "pad_token_id": 32,
        "bos_token_id": 32,
    },
}
_MADE_OF_TWO: dict[str, tuple[str, str, tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "vit-mbart": (
        "VisionEncoderDecoderModel",
        "vision-encoder-decoder",
        ("vit", _VIT),
        ("mbart", {**_BART, **_DECODER, "is_encoder_decoder": False}),
    ),
    "vit-trocr": (
        "VisionEncoderDecoderModel",
        "vision-encoder-decoder",
        ("vit", _VIT),
        ("trocr", {**_BART, **_DECODER, "cross_attention_hidden_size": 64}),
    ),
    "wav2vec2-bert": (
        "SpeechEncoderDecoderModel",
        "speech-encoder-decoder",
        ("wav2vec2", {**_TOWER, "hidden_size": 64, **_WAVES}),
        ("bert", {**_BERT, **_DECODER}),
    ),
}
"""Two models put together: class and type of the whole, and the type and sizes of each."""
_OF_OWN_KIND: dict[str, tuple[str, dict[str, Any]]] = {
    "dia": (
        "DiaForConditionalGeneration",
        {
            "encoder_config": {**_DIA, "vocab_size": VOCABULARY, "num_hidden_layers": 1},
            "decoder_config": {
                **_DIA,
                "vocab_size": 64,
                "num_hidden_layers": 2,
                "num_key_value_heads": 2,
                "cross_num_attention_heads": 8,
                "cross_num_key_value_heads": 8,
                "cross_head_dim": 32,
                "cross_hidden_size": 64,
                "eos_token_id": 60,
                "pad_token_id": 61,
                "bos_token_id": 62,
            },
            "delay_pattern": [0] * 9,
        },
    ),
    "florence2": (
        "Florence2ForConditionalGeneration",
        {
            "text_config": {**_BART, "model_type": "bart"},
            "vision_config": {
                "embed_dim": [16] * 4,
                "num_heads": [2] * 4,
                "num_groups": [2] * 4,
                "depths": [1] * 4,
                "projection_dim": 64,
            },
            "image_token_id": 127,
        },
    ),
    "musicgen": ("MusicgenForConditionalGeneration", _MUSIC),
    "musicgen_melody": (
        "MusicgenMelodyForConditionalGeneration",
        {**_MUSIC, "num_chroma": 12, "chroma_length": 20},
    ),
    "speecht5": (
        "SpeechT5ForSpeechToText",
        {**{key: value for key, value in _BART.items() if key != "d_model"}, "hidden_size": 64, **_WAVES},
    ),
    "udop": (
        "UdopForConditionalGeneration",
        {**_T5, "decoder_start_token_id": 1, "pad_token_id": 0, "image_size": 32, "patch_size": 8},
    ),
}
"""Families with another kind of input, by class and sizes."""
COMPOSING = ("musicgen", "musicgen_melody")
OTHERS: tuple[str, ...] = tuple(sorted({*_MADE_OF_TWO, *_OF_OWN_KIND}.difference(COMPOSING)))
_CLASSES = {
    "seamless_m4t": "SeamlessM4TForTextToText",
    "seamless_m4t_v2": "SeamlessM4Tv2ForTextToText",
    **{name: class_name for name, (class_name, _) in HEARING.items()},
}


def encoder_decoder(name: str, **overrides: Any) -> PreTrainedModel:
    """Builds a small model of a family, in evaluation mode; `overrides` are fields of its configuration."""
    config = _configuration(name, overrides)
    class_name = (
        (_MADE_OF_TWO | _OF_OWN_KIND)[name][0] if name in (*OTHERS, *COMPOSING) else _CLASSES.get(name)
    )  # type: ignore[index]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if class_name is not None:
            model = getattr(transformers, class_name)(config=config)
        else:
            model = AutoModelForSeq2SeqLM.from_config(config)
    _initialize(model, 1)
    _scale_queries_as_t5(model)
    model.generation_config.decoder_start_token_id = 1
    if name == "t5gemma":
        model.set_attn_implementation("eager")  # sdpa leaves its softcap out, or is refused
    return model.eval()


@torch.no_grad()
def _scale_queries_as_t5(model: PreTrainedModel) -> None:
    """T5 and its relatives have the scale of their logits, which are near 100 without, in their weights."""
    for name, parameter in model.named_parameters():
        if name.endswith((".q.weight", ".query.weight")) and hasattr(model.config, "d_kv"):
            parameter.mul_(model.config.d_kv**-0.5)


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
    if name in _MADE_OF_TWO:
        _, kind, encoder, decoder = _MADE_OF_TWO[name]
        config = CONFIG_MAPPING[kind].from_encoder_decoder_configs(
            *(CONFIG_MAPPING[part](**sizes) for part, sizes in (encoder, decoder))
        )
        config.decoder_start_token_id, config.pad_token_id = 1, 0
        return config
    if name in _OF_OWN_KIND:
        return CONFIG_MAPPING[name](**copy.deepcopy(_OF_OWN_KIND[name][1]))  # older releases write to it
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
    if name.startswith("vit"):
        return {"pixel_values": torch.randn(2, 3, 64, 64, generator=generator)}
    if name in ("speecht5", "wav2vec2-bert"):
        return {"input_values": torch.randn(2, 6000, generator=generator)}
    tokens = torch.randint(5, 120, (len(rows), max(rows)), generator=generator)
    if name == "udop":
        boxes = torch.rand(2, max(rows), 4, generator=generator)
        return {
            "input_ids": tokens,
            "bbox": boxes,
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        }
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
