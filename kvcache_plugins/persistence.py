"""Saving a cache packed, and loading it: `cache.safetensors` for the tensors, `cache.json` for the rest.

A prefilled document can be stored once and continued many times. Codes, metadata and the exact window are
written as they are, so a loaded cache continues bit for bit where the saved one stood. Both files carry the
same random name, so that a folder of which only one was replaced is not taken for a cache, and the second the
checksums of the tensors: a flipped bit would otherwise be read as another key or value.

An artifact that the options name (a calibration, retaining heads) is not copied. Where it lies is written as
an absolute path, too, and what codes are read by (levels, ranges, scales) as checksums: codes of a
calibration that has been replaced meanwhile, or of levels that this package had in an earlier version, would
be read as other keys and values.
"""

from __future__ import annotations

import json
import os
import uuid
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from .artifacts.files import read_json, read_tensors, write_json, write_tensors
from .artifacts.folders import replacing
from .artifacts.named import named_artifacts, still_there, with_artifacts_at
from .building import build_cache
from .cache import KVCache
from .encoder_decoder import KVEncoderDecoderCache, halves_of, layers_of
from .errors import ArtifactError, UnsupportedOperationError
from .layers.base import PackedLayer
from .layers.counting import tensors_in
from .layers.dense import check_states_are_here
from .layers.indexed import indexed_state, is_indexed, load_indexed_state
from .layers.recurrent import load_recurrent_state, recurrent_state
from .layers.storing import storing
from .models.decoder import decoder_config, split_model_or_config
from .models.layer_plan import key_value_heads
from .models.placement import layer_devices
from .models.short_windows import ShortWindowLayer

__all__ = ["FORMAT_VERSION", "load_cache", "save_cache"]

FORMAT_VERSION = 3
_TENSORS, _FACTS = "cache.safetensors", "cache.json"
_PAIR, _SUMS = "saved_as", "checksums"
_PATHS, _STATIC_SUMS = "artifact_paths", "artifact_checksums"


def save_cache(cache: KVCache | KVEncoderDecoderCache, directory: str | os.PathLike[str]) -> None:
    """Write `cache` into `directory`; a cache that is there already stays if this one cannot be written.

    Of an encoder-decoder model the layers of the text come first, then those of what the encoder has read.

    Raises:
        UnsupportedOperationError: If a layer of transformers' own is of a kind whose state is not known here,
            or the model keeps states in its own modules.
        ValueError: If `directory` is empty, or a forward did not come to its end.
        OSError: If it cannot be written.
    """
    if not os.fspath(directory):
        raise ValueError("save_pretrained needs the path of a directory, got ''.")
    text = halves_of(cache)[0]
    text.check_in_step()  # before it takes the place of a whole one
    check_states_are_here("save_pretrained", text.layers)
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for layer_idx, layer in enumerate(layers_of(cache)):
        layer_tensors, facts = (
            layer.state() if isinstance(layer, PackedLayer) else _dense_state(layer_idx, layer)
        )
        layers.append(facts | {_STATIC_SUMS: _static_sums(layer)})
        tensors |= {f"layers.{layer_idx}.{name}": _on_host(t) for name, t in layer_tensors.items()}
    facts = {
        "format_version": FORMAT_VERSION,
        "backend": cache.backend,
        "options": cache.config.to_dict(),
        "model": _fingerprint(cache.model_config),
        "layers": layers,
        "reads_long_text": getattr(cache, "reads_long_text", False),
        _PAIR: uuid.uuid4().hex,
        _SUMS: {name: _checksum(tensor) for name, tensor in tensors.items()},
        _PATHS: cache.artifact_paths,
    }
    with replacing(directory) as folder:
        write_tensors(folder / _TENSORS, tensors, {_PAIR: facts[_PAIR]})
        write_json(folder / _FACTS, facts)


@storing()
def load_cache(
    directory: str | os.PathLike[str], model_or_config: Any, artifacts: Mapping[str, str] | None = None
) -> KVCache | KVEncoderDecoderCache:
    """Read a cache saved by [`save_cache`] for the same model.

    Args:
        directory (`str`): Where it was saved.
        model_or_config (`PreTrainedModel | PreTrainedConfig`): The model it belongs to. With a model the
            tensors of every layer go where that layer is; with a configuration they stay on the CPU until
            `bind` tells of a model, or new tokens come.
        artifacts (`dict[str, str]`, *optional*): Where artifacts lie now, if they have been moved, by what
            the options of the cache name them: `{"old/heads": "new/heads"}`.

    Raises:
        ArtifactError: If files are missing or damaged, or were saved for a model of another shape or with
            another calibration.
        ValueError: If `artifacts` names one that the options do not.
    """
    folder = Path(directory)
    model, config = split_model_or_config(model_or_config)
    facts, tensors = _read_saved(folder, config)
    cache = _rebuilt(folder, facts, model_or_config, artifacts or {})
    if len(facts["layers"]) != (expected := len(layers_of(cache))):
        raise ArtifactError(f"{folder} holds {len(facts['layers'])} layers, expected {expected}.")
    devices = [device for half in halves_of(cache) for device in layer_devices(model, len(half.layers))]
    for layer_idx, device in enumerate(devices):
        _load_layer(folder, cache, layer_idx, device or torch.device("cpu"), facts, tensors)
    try:
        halves_of(cache)[0].check_in_step()
    except ValueError as error:
        raise ArtifactError(f"{folder}: {error}") from error
    if isinstance(cache, KVEncoderDecoderCache):
        cache.find_out_what_is_held()
    return cache


def _read_saved(folder: Path, config: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what the two files of a folder hold, if they are of one cache, of this format and this model."""
    facts, tensors = read_json(folder / _FACTS), read_tensors(folder / _TENSORS)
    if facts.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{folder}: format_version {FORMAT_VERSION} expected, got {facts.get('format_version')!r}: it is "
            "of a version of this package that lays codes out in another order. Allowed is that version, or "
            "to read the text again and to save it by this one."
        )
    expected_keys = ("backend", "options", "model", "layers", "reads_long_text", _PAIR, _SUMS, _PATHS)
    missing = [key for key in expected_keys if key not in facts]
    if missing:
        raise ArtifactError(f"{folder / _FACTS} lacks {missing}.")
    with safe_open(folder / _TENSORS, framework="pt") as file:
        if (file.metadata() or {}).get(_PAIR) != facts[_PAIR]:
            raise ArtifactError(f"{folder / _TENSORS} and {_FACTS} are of two caches; save it again.")
    expected = _fingerprint(decoder_config(config))
    if facts["model"] != expected:
        raise ArtifactError(f"{folder} was saved for the model {facts['model']}, not for {expected}.")
    return facts, tensors


def _rebuilt(
    folder: Path, facts: dict[str, Any], model_or_config: Any, artifacts: Mapping[str, str]
) -> KVCache | KVEncoderDecoderCache:
    """Return an empty cache with the options of the saved one."""
    known = set(named_artifacts(facts["options"]))
    if unknown := sorted(set(artifacts) - known):
        raise ValueError(f"artifacts must be of those that {folder} names, {sorted(known)}; got {unknown}.")
    moved = ""
    try:
        lay_at = facts[_PATHS]
        paths = still_there(lay_at) | dict(artifacts)
        options = with_artifacts_at(facts["options"], paths)
        if lost := sorted(name for name in lay_at if not Path(paths.get(name, name)).exists()):
            moved = f" Of what has been moved, artifacts={{{lost[0]!r}: PATH}} says where it lies now."
        cache = build_cache(model_or_config, {"backend": facts["backend"], **options})
    except (AttributeError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder / _FACTS}: {error}{moved}") from error
    if facts["reads_long_text"] and isinstance(cache, KVCache):
        model, _ = split_model_or_config(model_or_config)
        if model is None:
            raise ArtifactError(
                f"{folder} holds a long text of a model with two sets of rotary frequencies: it needs the "
                "model itself, got a configuration."
            )
        cache.reads_long_text = True
        cache.bind(model)  # now, because keys may have been coded relative to these frequencies
    return cache


def _load_layer(
    folder: Path,
    cache: KVCache | KVEncoderDecoderCache,
    layer_idx: int,
    device: torch.device,
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Give an empty layer what was saved of it, if that is whole and read by what it was packed with."""
    layer, prefix = layers_of(cache)[layer_idx], f"layers.{layer_idx}."
    stored = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    _check_sums(folder / _TENSORS, stored, facts[_SUMS])
    owned = {name.removeprefix(prefix): tensor.to(device) for name, tensor in stored.items()}
    load = layer.load_state if isinstance(layer, PackedLayer) else partial(_load_dense_state, layer)
    try:
        saved_sums = facts["layers"][layer_idx][_STATIC_SUMS]
        load(owned, facts["layers"][layer_idx])
        if isinstance(layer, PackedLayer) and owned:
            _check_lengths(layer)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder} does not hold all of layer {layer_idx}: {error!r}.") from error
    sums = _static_sums(layer)
    if saved_sums == sums:
        return
    if sums and not _is_calibrated(layer):
        raise ArtifactError(
            f"{folder}: layer {layer_idx} was packed by other levels than this version has for these "
            "options; its codes would be read as other keys and values. Allowed is the version that saved it."
        )
    raise ArtifactError(
        f"{folder}: layer {layer_idx} was packed with another calibration than is now in "
        f"{sorted(named_artifacts(cache.config.to_dict()))}. Allowed is the one it was packed with."
    )


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of a tensor on the host; 0.15 s a gigabyte, where loading takes 0.4 s or more."""
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.flatten().view(torch.uint8).numpy().data, kind)


def _check_sums(path: Path, tensors: dict[str, Tensor], sums: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(sums, dict) or sums.get(name) != _checksum(tensor):
            raise ArtifactError(f"{path} is damaged: {name} is not what was saved.")


def _static_sums(layer: Any) -> dict[str, int]:
    """Checksums of what a layer reads its codes by and does not save; nothing for one that holds none."""
    if not isinstance(layer, PackedLayer) or not layer.is_initialized:
        return {}
    return {
        f"{stream.side}_{name}": _checksum(_on_host(tensor))
        for part in layer.uniform_layers
        for stream in part.streams
        for name, tensor in stream.codec.static_state().items()
    }


def _is_calibrated(layer: PackedLayer) -> bool:
    """Whether what a layer reads its codes by comes from an artifact, and not from this package."""
    config: Any = layer.config
    stored = config.storage_config() if hasattr(config, "storage_config") else None
    return bool((stored or config).is_calibrated)


def _check_lengths(layer: PackedLayer) -> None:
    for part in layer.uniform_layers:
        lengths = [stream.length for stream in part.streams]
        is_odd = (
            not isinstance(part.cumulative_length, int) or part.cumulative_length != layer.cumulative_length
        )
        if len(set(lengths)) > 1 or is_odd:
            raise ValueError(f"{lengths} keys and values of {part.cumulative_length!r} tokens")


def _fingerprint(config: Any) -> dict[str, Any]:
    """What must agree for a cache to make sense: the family and the shape of its keys and values."""
    heads = [list(key_value_heads(config, index)) for index in range(config.num_hidden_layers)]
    rope = getattr(config, "rope_parameters", None)
    # through json, so that what is compared on loading has been written and read in the same way
    facts: dict[str, Any] = json.loads(
        json.dumps({"model_type": config.model_type, "heads": heads, "rope": rope})
    )
    return facts


def _dense_state(layer_idx: int, layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if type(layer) is LinearAttentionLayer:
        return recurrent_state(layer)
    if next(tensors_in(vars(layer)), None) is None:
        return {}, {}
    if is_indexed(layer):
        return indexed_state(layer), {}
    if type(layer) not in (DynamicLayer, ShortWindowLayer):
        raise UnsupportedOperationError(
            f"save_pretrained: layer {layer_idx}, of type {type(layer).__name__}, may keep more than keys "
            "and values, which is not saved."
        )
    if getattr(layer, "keys", None) is None:
        return {}, {}
    facts = {"cumulative_length": layer.get_seq_length()}
    return {"keys": layer.keys, "values": layer.values}, facts


def _load_dense_state(layer: Any, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    if not tensors:
        return
    if type(layer) is LinearAttentionLayer:
        load_recurrent_state(layer, tensors, facts)
        return
    if is_indexed(layer):
        load_indexed_state(layer, tensors)
        return
    layer.lazy_initialization(tensors["keys"], tensors["values"])
    layer.keys, layer.values = tensors["keys"], tensors["values"]
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = facts["cumulative_length"]
