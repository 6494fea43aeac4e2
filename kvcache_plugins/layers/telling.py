"""What a layer tells the user whose model it serves."""

from __future__ import annotations

import warnings

__all__ = ["TellingLayer"]


class TellingLayer:
    """Part of a layer that warns.

    Attributes:
        is_trial (`bool`): Whether it is only looked at, and another one in its place will serve and warn. (To
            silence all warnings meanwhile would silence those of other threads.)
    """

    is_trial = False

    def warn(self, message: str) -> None:
        """Warn of something that a user may not expect of this layer, unless it is a trial."""
        if not self.is_trial:
            warnings.warn(message, stacklevel=3)
