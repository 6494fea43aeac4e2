"""Words of the synthetic tasks."""

from __future__ import annotations

__all__ = ["FACTS", "NAMES", "PASSKEYS", "THINGS"]

PASSKEYS = (
    (
        " The pass key is {value}. Remember it. {value} is the pass key.",
        " What is the pass key? The pass key is",
    ),
    (" The pass key is {value}.", " What is the pass key? The pass key is"),
    (" Remember this: the secret number is {value}.", " What is the secret number? The secret number is"),
    (" The magic word is {value}. Do not forget it.", " What is the magic word? The magic word is"),
    (" The answer to the riddle is {value}.", " What is the answer to the riddle? The answer is"),
    (" My number is {value}, and nobody else knows it.", " What is my number? My number is"),
)
"""Statements and the questions for them; `{value}` is what answers."""

FACTS = (
    (" The code of {name} is {value}.", " What is the code of {name}? The code of {name} is"),
    (" The code of {name} is {value}.", " The code of {name} is"),
    (
        " The code of {name} is {value}. Remember it. {value} is the code of {name}.",
        " What is the code of {name}? The code of {name} is",
    ),
    (" The number of {name} is {value}.", " What is the number of {name}? The number of {name} is"),
    (" The pass key of {name} is {value}.", " What is the pass key of {name}? The pass key of {name} is"),
    (" The secret of {name} is {value}.", " What is the secret of {name}? The secret of {name} is"),
    (" Remember: {name} has number {value}.", " Which number has {name}? {name} has number"),
    (" {name} lives at {value}.", " Where does {name} live? {name} lives at"),
)
"""Statements about somebody or something, `{name}`, and the questions for them."""

_NAMES = """
Alice Bob Carol David Emma Frank Grace Henry Irene Jack Kate Laura Mary Nora Oliver Peter Quentin Rose
Susan Thomas Ursula Victor William Anna John Robert George Edward Charles James Elizabeth Jane Arthur
Margaret Daniel Lucy Martha Samuel Harriet Joseph Sarah Richard Philip Ruth Helen Walter
"""
_THINGS = """
house garden river table window captain letter horse castle forest ship doctor bridge lamp village king
silver mountain book door sister island morning glass coat winter bread church candle road tower kitchen
mirror basket stone feather hammer lantern pocket market
"""
NAMES = tuple(_NAMES.split())
THINGS = tuple(_THINGS.split())
