"""Tables of positions: what is read beyond their end fails in the model, and is refused before."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING

from kvcache_plugins.models.positions import check_positions
from tests.models.families import NAMES, as_far_as_it_can_be_built, small_model

POSITIONS, BEYOND = 128, 170
OF_ANOTHER_KIND = "ctrl"  # neither an embedding nor a buffer
FEW_WITH_TABLES = ("bart", "gpt2", "gptj", "opt")
FEW = (*FEW_WITH_TABLES, "bloom", "gpt_neox", "llama", "xglm")
BROKEN = frozenset({"reformer", "xlnet"})
"""What cannot be built with a number of positions, in the release that was looked through."""


def reads(model: torch.nn.Module, tokens: int) -> bool:
    try:
        with torch.no_grad():
            model(input_ids=torch.randint(5, 100, (1, tokens)))
    except (IndexError, RuntimeError):  # of an embedding, of a buffer
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.in_depth) for n in NAMES if n not in FEW)]
)
def test_what_has_a_table_is_what_fails_beyond_it(name: str) -> None:
    field = getattr(CONFIG_MAPPING[name], "attribute_map", {}).get("max_position_embeddings")
    with as_far_as_it_can_be_built(name, BROKEN):
        model = small_model(name, **{field or "max_position_embeddings": POSITIONS})
    if name not in FEW and (model.config.max_position_embeddings != POSITIONS or not reads(model, POSITIONS)):
        pytest.skip("counts its positions in another way")
    check_positions(model, POSITIONS, "--lengths")
    if reads(model, BEYOND):
        assert name not in FEW_WITH_TABLES
        check_positions(model, BEYOND, "--lengths")
        return
    if name == OF_ANOTHER_KIND:
        pytest.skip("a table of another kind")
    with pytest.raises(ValueError, match=f"--lengths must be at most {POSITIONS}, got {BEYOND}: "):
        check_positions(model, BEYOND, "--lengths")
