"""The conformance suite of backends that evict: what they owe their users once something has gone.

`BackendConformance` asks of such a backend what it asks of all, with a budget that nothing exceeds. Here a
tiny model reads prompts of two and more budgets in chunks, and generates:

* the budget is kept, exactly; sinks and the newest tokens stay; every token is where it was in the text;
* what is kept is what the model gave, bit for bit, or its codes, and stands in `report()`;
* `estimate` predicts the bytes of it, over every storage;
* `generate()` does what a loop by hand does; a budget that nothing exceeds is the dense cache;
* a row of a padded batch keeps what it would keep alone, and pads go first;
* rows are reordered, selected and repeated, tokens cropped or refused, a cache moved, copied, reset, saved
  and loaded: scores and whatever a policy remembers besides (`companions`) go along.

A third party subclasses it in a test file, once for each set of options to be tested, a storage among them:

```python
class TestMine(EvictionConformance):
    @pytest.fixture(params=[None, {"backend": "int8"}])
    def cache_config(self, request):
        return {"backend": "mine", "storage": request.param}
```

`forgets_rejected_tokens` returns `False` for a policy for which queries that were cropped have counted.
A policy of its own mathematics has tests of its own beside: the suite cannot know what a token is worth.
"""

from __future__ import annotations

from .batches import BatchConformance
from .keeping import KeepingConformance
from .predicting import PredictionConformance
from .verbs import EvictedVerbConformance

__all__ = ["EvictionConformance"]


class EvictionConformance(
    KeepingConformance, BatchConformance, EvictedVerbConformance, PredictionConformance
):
    """Tests of one evicting backend; `cache_config` says which, and with what options beside the budget."""
