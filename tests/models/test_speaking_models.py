"""Models that hear and speak: what their parts hand on to one another is what it is with the dense cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from kvcache_plugins.errors import UnsupportedOperationError
from kvcache_plugins.models.cache_argument import cache_of
from tests.models.showing import noise
from tests.models.speaking import csm, kyutai, qwen3_omni


def asking(cache_config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": "quantized", "cache_config": dict(cache_config)}


@pytest.mark.skipif("kyutai_speech_to_text" not in CONFIG_MAPPING, reason="this transformers has no Kyutai")
def test_a_configuration_that_will_be_saved_is_given_no_name() -> None:
    """Kyutai has its codec's cache prepared by the configuration that `save_pretrained` writes."""
    model = kyutai()
    own = model.codec_model.generation_config
    names = set(vars(own))
    model.generate(input_values=noise(2, 1, 80 * 20 * 8), max_new_tokens=4)
    assert own.cache_implementation == "dynamic"  # so it was the one
    assert set(vars(own)) == names


@pytest.mark.skipif("qwen3_omni_moe" not in CONFIG_MAPPING, reason="this transformers has no Qwen3-Omni")
def test_a_talker_goes_on_from_the_states_of_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a last chunk and of as many generated tokens are as long, and were taken for them."""
    model, heard = qwen3_omni(), []
    generate = model.talker.generate

    def listening(**arguments: Any) -> Any:
        heard.append(arguments["inputs_embeds"].clone())
        return generate(**arguments)

    monkeypatch.setattr(model.talker, "generate", listening)
    tokens = torch.randint(20, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    tokens[0, [0, 1, -4, -3, -2]] = torch.tensor([16, 15, 17, 16, 18])  # a user speaks, then an assistant

    def told_the_talker(**cache: Any) -> Tensor:
        model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            thinker_max_new_tokens=60,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_max_new_tokens=3,
            talker_do_sample=False,
            **cache,
        )
        return heard.pop()

    expected = told_the_talker()
    got = told_the_talker(**asking({"backend": "knorm", "budget": 40, "chunk_size": 32}))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif("csm" not in CONFIG_MAPPING, reason="this transformers has no CSM")
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("options", [{"chunk_size": 16}, {"chunk_size": 2}, {}], ids=["16", "2", "1024"])
def test_a_prompt_of_codes_is_read_whole(options: dict[str, Any], is_padded: bool) -> None:
    model = csm()
    codes = torch.randint(0, 60, (2, 50, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, : 9 * is_padded] = 0

    def first(**cache: Any) -> tuple[Any, Tensor]:
        output = model.generate(
            input_ids=codes,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **cache,
        )
        return output, output.logits[0]

    _, expected = first()
    output, logits = first(**asking({"backend": "snapkv", "budget": 20, "window_length": 4, **options}))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    report = cache_of(output).report()
    assert report.tokens_held < report.tokens_seen == 53
    assert ("the codes of its tokens" in str(report.whole_prompt_reason)) == ("chunk_size" in options)


@pytest.mark.skipif("csm" not in CONFIG_MAPPING, reason="this transformers has no CSM")
@pytest.mark.parametrize("backend", ["kvzip", "sirllm"])
@pytest.mark.parametrize("lowest", [0, 20], ids=["as of a placeholder", "other"])
def test_what_reads_text_refuses_codes(backend: str, lowest: int) -> None:
    """Whether or not one of them is the number of a token that stands for sounds."""
    model = csm()
    codes = torch.arange(2 * 30 * 4).view(2, 30, 4) % 40 + lowest
    with pytest.raises(UnsupportedOperationError, match="has tokens of 4 codes, which stand for"):
        model.generate(codes, max_new_tokens=2, **asking({"backend": backend, "budget": 20}))
