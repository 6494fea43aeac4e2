"""The conformance suite: what every backend owes its users, whatever it computes.

A third party runs it on its own backend by subclassing in a test file:

```python
class TestMine(BackendConformance):
    @pytest.fixture
    def cache_config(self):
        return {"backend": "mine", "residual_length": 16}
```

A backend that evicts is asked the same of what it keeps, so it needs a budget larger than all it is fed, and
a storage that packs: `{"backend": "mine", **MyConfig.tiny().to_dict()}`. What it owes once something has gone
is asked by `kvcache_plugins.testing.EvictionConformance`.

Layers are fed random tensors, so that every boundary is crossed within a few hundred tokens and every claim
is about bytes, not about text.
"""

from __future__ import annotations

from .contract import ContractConformance
from .feeding import decoded, fed, feed, state_bytes
from .fidelity import FidelityConformance
from .options import OptionConformance
from .verbs import VerbConformance

__all__ = ["BackendConformance", "decoded", "fed", "feed", "state_bytes"]


class BackendConformance(ContractConformance, FidelityConformance, VerbConformance, OptionConformance):
    """Tests of one backend; `cache_config` says which, with settings that pack within a few dozen tokens."""
