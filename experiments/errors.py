"""One exception for everything that a user of the command line can get wrong."""


class BadInput(ValueError):
    """One sentence that says what is wrong and what to do; the command exits with 2."""
