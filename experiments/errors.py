"""One exception for everything that a user of the command line can get wrong."""

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(ValueError):
    """One sentence that says what is wrong and what to do; the command exits with 2."""


@contextmanager
def blaming(sentence: str) -> Iterator[None]:
    """Tell errors in this sentence: they come from what a file of the user's holds.

    A file can be whole JSON and yet hold text where numbers belong, or numbers beyond any float.
    """
    try:
        yield
    except BadInput:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise BadInput(sentence) from error
