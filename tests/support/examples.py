"""How many examples a property has that needs fewer than the profile gives."""

from hypothesis import settings

_WHOLE = 100  # What hypothesis gives by default.


def few(examples: int) -> settings:
    """Give a property so many examples, and more where the profile has over a hundred.

    Profiles with fewer than a hundred give no more than they have.
    ``@settings(max_examples=...)`` alone would overrule ``--hypothesis-profile``.
    """
    profile = settings().max_examples
    if profile < _WHOLE:
        return settings(max_examples=min(examples, profile))
    return settings(max_examples=examples * profile // _WHOLE)
