"""Images that do not match the tokens that stand for them: chunks of a prompt hide none from its model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import kvcache_plugins as kvp
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.prompt_chunks import why_not_filled
from tests.models.multimodal import NAMES, subject
from tests.models.showing import IMAGE, PADS, ROPE, START, STOP, TEXT, Subject, make, noise
from tests.models.test_multimodal_models import READ_WHOLE, SPLITS_IMAGES

SPLIT = sorted({*NAMES} - READ_WHOLE - {"git"})  # what is shown to GIT has no tokens
EVICTING: dict[str, Any] = {"backend": "knorm", "budget": 12, "chunk_size": 8, "sink_length": 2}
# Idefics3 of earlier releases takes as much of the images as it finds tokens for, whatever the cache.
CHECKING = [name for name in SPLIT if SPLITS_IMAGES or name != "idefics3"]
OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")
VIDEO = 6


def run(model: Any, prompt: dict[str, Tensor], cache: Any = None, **options: Any) -> Tensor:
    """The first new token's logits `(B, vocabulary)`."""
    settings: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, **options}
    if cache is not None:
        settings |= as_argument(cache)
    out = model.generate(**prompt, **settings, output_logits=True, return_dict_in_generate=True)
    logits: Tensor = out.logits[0]
    return logits


def error_of(model: Any, prompt: dict[str, Tensor], cache: Any = None, **options: Any) -> str:
    """What a call is refused with."""
    with pytest.raises((ValueError, RuntimeError, IndexError, StopIteration)) as caught:
        run(model, prompt, cache, **options)
    return f"{caught.type.__name__}: {caught.value}"


def with_images(given: Subject, times: int) -> dict[str, Tensor]:
    """The prompt with its images given several times."""
    features = {key: torch.cat([value] * times) for key, value in given.prompt.items() if key not in OF_TEXT}
    return {**given.prompt, **features}


def truncated(given: Subject) -> dict[str, Tensor]:
    """The prompt, which ends inside of the image of its padded row."""
    count = int((given.prompt["input_ids"][0] == IMAGE).sum())
    end = PADS + 8 + count - 1
    return {key: value[:, :end] if key in OF_TEXT else value for key, value in given.prompt.items()}


def without_a_place(given: Subject) -> dict[str, Tensor]:
    """The prompt with words in the place of its image, which is given."""
    prompt = {**given.prompt, **given.text_alone()}
    if "mm_token_type_ids" in prompt:
        prompt["mm_token_type_ids"] = torch.zeros_like(prompt["input_ids"])
    return prompt


@pytest.mark.parametrize("name", CHECKING)
@pytest.mark.parametrize("what", ["truncated", "two images", "no place"])
def test_a_prompt_that_does_not_match_its_images_is_refused(name: str, what: str) -> None:
    given = subject(name)
    prompts = {
        "truncated": truncated,
        "two images": lambda it: with_images(it, 2),
        "no place": without_a_place,
    }
    prompt = prompts[what](given)
    expected = error_of(given.model, prompt)
    cache = kvp.build_cache(given.model, EVICTING)
    assert error_of(given.model, prompt, cache) == expected
    assert cache.get_seq_length() == 0


def second_turn(given: Subject, times: int) -> dict[str, Tensor]:
    """What the first turn was, behind that and an answer; with the images of both turns, or the new ones."""
    prompt, first = with_images(given, times), given.prompt
    words = torch.where(first["input_ids"] == 0, 30, first["input_ids"])
    answer = torch.full((2, 2), 30)
    prompt["input_ids"] = torch.cat((first["input_ids"], answer, words), dim=1)
    prompt["attention_mask"] = (prompt["input_ids"] != 0).long()
    if "mm_token_type_ids" in prompt:
        prompt["mm_token_type_ids"] = (prompt["input_ids"] == IMAGE).long()
    return prompt


def after_a_turn(given: Subject, cache_config: dict[str, Any]) -> Any:
    """A cache that has read the first turn."""
    cache = kvp.build_cache(given.model, cache_config)
    run(given.model, given.prompt, cache)
    return cache


@pytest.mark.parametrize("name", CHECKING)
def test_images_of_an_earlier_turn_are_not_shown_again(name: str) -> None:
    """Their tokens have been read, and the new image would be mistaken for the first."""
    given = subject(name)
    prompt = second_turn(given, 2)
    expected = error_of(given.model, prompt, after_a_turn(given, {"backend": "int8"}))
    assert error_of(given.model, prompt, after_a_turn(given, EVICTING)) == expected
    if SPLITS_IMAGES:  # whoever asked for chunks
        cache = after_a_turn(given, {"backend": "int8"})
        assert error_of(given.model, prompt, cache, prefill_chunk_size=8) == expected


@pytest.mark.parametrize("name", ["internvl", "llava"])
def test_the_image_of_a_later_turn_is_read_in_chunks(name: str) -> None:
    given = subject(name)
    cache = after_a_turn(given, EVICTING)
    logits = run(given.model, second_turn(given, 1), cache)
    assert (cache.report().whole_prompt_reason is None) == SPLITS_IMAGES
    prompt = {**given.with_other_features(), **{key: second_turn(given, 1)[key] for key in OF_TEXT[:2]}}
    other = run(given.model, prompt, after_a_turn(given, EVICTING))
    assert (logits - other).norm() > 0.01 * logits.norm()


@pytest.mark.parametrize("name", SPLIT)
def test_beams_have_as_many_images_as_tokens(name: str) -> None:
    given = subject(name)
    cache = kvp.build_cache(given.model, EVICTING)
    run(given.model, given.prompt, cache, num_beams=2)
    assert (cache.report().whole_prompt_reason is None) == SPLITS_IMAGES


def _with_video(name: str, **tower: Any) -> Subject:
    """A model that is shown a video of two frames, whose tokens GLM-4V calls those of images."""
    vision_config = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, **tower}
    rope = {**ROPE, "mrope_section": [2, 3, 3]}
    config = CONFIG_MAPPING[name](
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={"hidden_size": 64, "temporal_patch_size": 2, **vision_config},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **{"image_start_token_id": START, "image_end_token_id": STOP} if name == "glm4v" else {},
        **{"video_start_token_id": 7, "video_end_token_id": 8} if name == "glm4v" else {},
        **{"vision_start_token_id": START, "vision_end_token_id": STOP} if name != "glm4v" else {},
    )
    words = torch.randint(20, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    token = IMAGE if name == "glm4v" else VIDEO
    seen = [*words[0, :8].tolist(), 7 if name == "glm4v" else START]
    for _ in range(2):
        seen += [START, *[token] * 4, STOP] if name == "glm4v" else [token] * 4
    ids = torch.tensor([[*seen, 8 if name == "glm4v" else STOP, *words[0, 8:].tolist()]])
    prompt = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": 2 * (ids == token).long(),
        "pixel_values_videos": noise(32, 3 * 2 * 14 * 14),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
    }
    return Subject(make(config), prompt, "pixel_values_videos")


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_videos(name: str) -> None:
    """GLM-4V finds its videos by the tokens of images, and was shown none of them in chunks."""
    tower = {"embed_dim": 64, "hidden_size": 64} if name == "qwen2_vl" else {"out_hidden_size": 64}
    if name == "glm4v":
        tower |= {"intermediate_size": 64, "image_size": 56}
    given = _with_video(name, **tower)
    expected, other = run(given.model, given.prompt), run(given.model, given.with_other_features())
    assert (expected - other).norm() > 0.01 * expected.norm()
    length = given.prompt["input_ids"].shape[1]
    cache = kvp.build_cache(given.model, {**EVICTING, "budget": length - 1})
    torch.testing.assert_close(run(given.model, given.prompt, cache), expected, atol=1e-4, rtol=1e-4)
    assert (cache.report().whole_prompt_reason is None) == (SPLITS_IMAGES and name == "qwen2_vl")
    if name == "glm4v" and SPLITS_IMAGES:
        message = r"8 features of videos come with 0 tokens for them \(video_token_id=6\)"
        assert re.fullmatch(message, str(cache.report().whole_prompt_reason))
    twice = {key: torch.cat([value] * 2) if "video" in key else value for key, value in given.prompt.items()}
    error = error_of(given.model, twice)
    assert error_of(given.model, twice, kvp.build_cache(given.model, EVICTING)) == error


def test_features_that_cannot_be_counted() -> None:
    tokens, config = torch.full((1, 4), IMAGE), subject("llava").model.config
    for pooled in (None, [torch.zeros(())], [["a"]]):
        assert "None features of images come with 4" in str(
            why_not_filled(config, tokens, {"image": {"pooler_output": pooled}, "video": None})
        )
    for pooled in (torch.zeros(2, 2, 8), [torch.zeros(1, 8), torch.zeros(3, 8)]):
        assert why_not_filled(config, tokens, {"image": {"pooler_output": pooled}}) is None
