"""How many examples a property has that needs fewer than the profile gives."""

from hypothesis import settings

_WHOLE = (
    100  # What hypothesis gives by default, and all our profiles but the quick one.
)


def few(examples: int) -> settings:
    """Give a property this many examples, or those of a quick profile if it has fewer.

    ``@settings(max_examples=...)`` alone would overrule ``--hypothesis-profile quick``.
    """
    profile = settings().max_examples
    quick = profile < _WHOLE
    return settings(max_examples=min(examples, profile) if quick else examples)
