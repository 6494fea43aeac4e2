"""The model card of retaining heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["heads_card"]

_CARD = """\
---
library_name: kvcache-plugins
tags: [kv-cache, eviction, locret]
{base_model_line}---
# Retaining heads for {base_model}

Small networks that score every key and value of a prompt while it is read, for the backend `locret` of
`kvcache_plugins`, which keeps the best of them: Locret (arXiv 2410.01805). The model itself is unchanged.

```python
import kvcache_plugins

model.generate(
    **inputs,
    cache_implementation="quantized",
    cache_config={{"backend": "locret", "heads": "HEADS"}},
)
```

Without a `budget`, the cache has the one they were trained for, {budget} tokens, and what else is not given
of `chunk_size` ({chunk_size}), `stabilizer_length` ({stabilizer_length}) and `local_length` ({local_length}).

| | |
|---|---|
| model | {base_model}: {num_hidden_layers} layers, {num_attention_heads} query heads, \
{num_key_value_heads} kv heads of {head_dim} channels |
| a head | {input_dim} channels (queries, keys, values before rotation) to {hidden_dim}, \
`{hidden_act}`, to {num_key_value_heads} scores |
| parameters | {parameters:,} |
| label | largest scaled logit that a query of the answer gives the key, over the query heads of its group |
| loss | smooth L1, mean over layers, plus 0.0025 times the squared step between neighbours, \
summed over layers |
| data | {data} |
| training | {steps} steps of {batch} prompts, learning rate {learning_rate:g}, {seconds:.0f} seconds |

Recall@10 %: which part of the tenth of a prompt's tokens with the largest labels is among the tenth with
the largest scores, per key-value head, on {eval_examples} prompts of text that no step has seen.

| layer | these heads | before training | `knorm` (minus the norm of the key) |
|---|---|---|---|
{rows}
"""


_ANSWERS = """
The text behind those prompts, read through caches, in nats a token; the increase is over the dense cache.

| cache | negative log-likelihood | increase | bytes | of dense |
|---|--:|--:|--:|--:|
{rows}
"""


def heads_card(
    facts: Mapping[str, Any],
    recalls: Mapping[str, Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a card in Markdown that says what heads are, how good, and how to use them.

    Args:
        facts (`Mapping`): The fields of their configuration, and `parameters`, `data`, `steps`, `batch`,
            `learning_rate`, `seconds`, `eval_examples`.
        recalls (`Mapping`): For `"trained"`, `"untrained"` and `"knorm"` the mean `recall`, the
            `recall_layers` it is of, and `recall_by_layer`.
        answers (`Sequence[Mapping]`): Results of `score_answers`, if there are any.
    """
    columns = [recalls[name] for name in ("trained", "untrained", "knorm")]
    rows = [
        f"| {layer} | " + " | ".join(f"{column['recall_by_layer'][layer]:.3f}" for column in columns) + " |"
        for layer in range(facts["num_hidden_layers"])
    ]
    evicting = len(columns[0]["recall_layers"])
    mean = "all" if evicting == facts["num_hidden_layers"] else "all that evict"
    rows.append(f"| {mean} | " + " | ".join(f"{column['recall']:.3f}" for column in columns) + " |")
    name = facts.get("base_model_name_or_path")
    is_hub_id = "/" in str(name or "")
    card = _CARD.format(
        **{**facts, **facts["defaults"]},
        base_model=f"`{name}`" if name else "a model",
        base_model_line=f"base_model: {name}\n" if is_hub_id else "",
        rows="\n".join(rows),
    )
    if not answers:
        return card
    lines = [
        f"| {row['label']} | {row['nll']:.4f} | {row['nll_increase']:+.4f} ±{row['nll_increase_stderr']:.4f} "
        f"| {row['kv_bytes']:,} | {row['memory_fraction']:.3f} |"
        for row in answers
    ]
    return card + _ANSWERS.format(rows="\n".join(lines))
