r"""lm-evaluation-harness (`lm_eval`) with the caches of this package.

The harness knows nothing of this package, and has no entry point through which it could be told. This module
starts it with everything in place; what follows its name is what `lm_eval` itself takes:

    python -m kvcache_plugins.evaluation.lm_eval_model run --model hf-kvcache \
        --model_args '{"pretrained": "PATH_OR_HUB_ID", "cache_config": {"backend": "kivi", "nbits": 2}}' \
        --tasks hellaswag,gsm8k

Two ways to choose a cache:

* `--model hf-kvcache` with a `cache_config` among its `--model_args`. Generation uses the cache, and
  log-likelihoods are read through it too: all of the context but its last token fills it, and the
  continuation is scored token by token after that, so that even the single token of a multiple-choice answer
  is predicted from packed keys and values. Requests run one at a time; those that differ only in their last
  token share a run. `{"backend": "dense"}` gives the harness's own numbers.
* `--model hf`, the harness's own model, with the cache among the options of `generate()`. Tasks that generate
  use it; log-likelihoods come from one pass without a cache and do not depend on it:

      ... run --model hf --model_args pretrained=PATH_OR_HUB_ID --tasks gsm8k \
          --gen_kwargs '{"cache_implementation": "quantized", "cache_config": {"backend": "kivi"}}'

Give the options as JSON: the harness (0.4.13) refuses a dictionary inside `key=value,key=value`.

From Python, `register()` does the same before `lm_eval.simple_evaluate(model="hf-kvcache", ...)`. There,
give `gen_kwargs` as a dictionary: a string is cut at every comma, those inside braces too.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..models.cache_argument import as_argument
from ..runs.labels import DENSE
from .caches import generation_options, new_cache, prefill, why_unavailable
from .perplexity.blocks import exact_blocks

__all__ = ["MODEL_NAME", "continuation_logits", "main", "register"]

MODEL_NAME = "hf-kvcache"
"""Name of the model in the harness."""

_BLOCK_LENGTH = 64  # tokens read at once where that gives what one at a time gives

_Request = tuple[Any, list[int], list[int]]
"""What the harness asks: the texts (or None), and the token ids of context and continuation."""


def main() -> None:
    """Run the harness's command line with `hf-kvcache` registered; say so if lm_eval is not installed."""
    try:
        register()
    except ImportError as error:
        sys.exit(f"error: {error}")
    importlib.import_module("lm_eval.__main__").cli_evaluate()


@lru_cache(maxsize=1)
def register() -> type:
    """Make `hf-kvcache` known to the harness, and return its class; calling it again changes nothing.

    Raises:
        ImportError: If lm_eval is not installed.
    """
    try:
        registry: Any = importlib.import_module("lm_eval.api.registry")
        huggingface: Any = importlib.import_module("lm_eval.models.huggingface")
    except ImportError as error:
        raise ImportError(
            f"The model {MODEL_NAME!r} needs lm_eval (pip install 'kvcache-plugins[lm_eval]'): {error}."
        ) from error
    return _define(registry, huggingface)


@torch.inference_mode()
def continuation_logits(
    model: Any, cache_config: Mapping[str, Any], token_ids: Sequence[int], count: int
) -> torch.Tensor:
    """Return what the model predicts after each of the last tokens, read through a fresh cache.

    The tokens before them fill the cache at once. They themselves are read so that each prediction is that of
    one token at a time.

    Args:
        model (`PreTrainedModel`): A decoder, in evaluation mode.
        cache_config (`Mapping`): `"backend"` and its options; `"dense"` is the ordinary cache.
        token_ids (`Sequence[int]`): Context, and the continuation without its last token.
        count (`int`): Tokens of the continuation, at most those of `token_ids`.

    Returns:
        `torch.Tensor` of shape `(count, vocabulary)`: Logits, in the model's dtype.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([list(token_ids)], dtype=torch.long, device=device)
    start, stop = ids.shape[1] - count, ids.shape[1]
    cache = new_cache(model, cache_config, max_cache_length=stop)
    if start:
        prefill(model, ids[:, :start], cache, stop, logits_to_keep=1)
    blocks = exact_blocks(cache, start, stop, _BLOCK_LENGTH)
    return torch.cat(
        [
            model(input_ids=ids[:, b.start : b.stop], **as_argument(cache), use_cache=True).logits[0]
            for b in blocks
        ]
    )


def _define(registry: Any, huggingface: Any) -> type:
    """Define and register the class, whose base exists only where the harness is installed."""

    @registry.register_model(MODEL_NAME)
    class KVCacheLM(huggingface.HFLM):  # type: ignore[misc]  # the base is optional, and untyped
        """The harness's model of transformers, with a cache of choice.

        Args:
            pretrained (`str | PreTrainedModel`): As for `hf`, like all other arguments.
            cache_config (`dict | str`): `"backend"` and its options; a string is read as JSON.
        """

        def __init__(
            self, pretrained: Any, *args: Any, cache_config: dict[str, Any] | str = "", **options: Any
        ) -> None:
            self.cache_config = _checked(cache_config)
            super().__init__(pretrained, *args, **options)
            if self.backend != "causal":
                raise ValueError(f"{MODEL_NAME} takes decoders, got a model of kind {self.backend!r}.")
            reason = why_unavailable(self.model.config, self.cache_config)
            if reason is not None:
                raise ValueError(f"The cache {self.cache_config!r} cannot be used: {reason}.")

        def _model_generate(
            self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any
        ) -> Any:
            options = generation_options(self.cache_config) | options
            return super()._model_generate(context, max_length, stop, **options)

        def _loglikelihood_tokens(
            self, requests: list[_Request], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            from tqdm import tqdm

            answers: dict[int, tuple[float, bool]] = {}
            hides_progress = disable_tqdm or self.rank != 0
            with tqdm(total=len(requests), disable=hides_progress, desc="log-likelihoods") as bar:
                for (token_ids, count), members in _grouped(requests, self.max_length).items():
                    log_probs = self._log_probs(token_ids, count)
                    for index in members:
                        texts, _, continuation = requests[index]
                        answers[index] = _score(log_probs, continuation)
                        if texts is not None:
                            self.cache_hook.add_partial("loglikelihood", texts, answers[index])
                    bar.update(len(members))
            return [answers[index] for index in range(len(requests))]

        def _log_probs(self, token_ids: tuple[int, ...], count: int) -> torch.Tensor:
            precision = self.mixed_precision_dtype
            with torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
                logits = continuation_logits(self.model, self.cache_config, token_ids, count)
            return logits.log_softmax(-1, dtype=self.softmax_dtype)

    return KVCacheLM


def _checked(cache_config: Any) -> dict[str, Any]:
    """Return the options of a cache, the backend in lower case."""
    given = cache_config
    if isinstance(cache_config, str):
        try:
            cache_config = json.loads(cache_config)
        except json.JSONDecodeError:
            cache_config = None
    if not isinstance(cache_config, dict) or not isinstance(cache_config.get("backend"), str):
        raise ValueError(
            f"{MODEL_NAME} needs a cache_config that names a backend, such as "
            f'{{"backend": "kivi", "nbits": 2}}, got {given!r}.'
        )
    options: dict[str, Any] = {**cache_config, "backend": cache_config["backend"].lower()}
    if options["backend"] == "dense" and options != DENSE:
        raise ValueError(f"The backend 'dense' takes no options, got {given!r}.")
    return options


def _grouped(requests: Sequence[_Request], max_length: int) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Put requests together that read the same tokens, as many of them one by one; the longest come first.

    Returns:
        `dict`: Indices of requests by the tokens that are read, cut from the left to what the model can hold,
        and the number of those that are predicted.
    """
    groups: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for index, (_, context, continuation) in enumerate(requests):
        token_ids = tuple((context + continuation)[-(max_length + 1) : -1])
        groups.setdefault((token_ids, len(continuation)), []).append(index)
    return dict(sorted(groups.items(), key=lambda group: -len(group[0][0])))


def _score(log_probs: torch.Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """Return the log-likelihood of a continuation, and whether it is what greedy generation would give."""
    targets = torch.tensor(continuation, device=log_probs.device)
    picked = log_probs.gather(1, targets[:, None])
    return float(picked.sum()), bool((log_probs.argmax(-1) == targets).all())


if __name__ == "__main__":
    main()
