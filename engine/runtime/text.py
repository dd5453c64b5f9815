"""Text for people: one printable line, and the difference between two lists of names."""

from collections.abc import Sequence


def one_line(text: str, length: int = 500) -> str:
    """Returns `text` shortened to `length` characters, with escapes for characters that cannot be printed."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return text if len(text) < length else f"{text[: length - 3]}..."


def describe_error(error: BaseException, length: int = 200) -> str:
    """Returns the class and the message of `error` in one printable line of at most `length` characters."""
    return one_line(" ".join(f"{type(error).__name__}: {error}".split()), length)


def describe_difference(
    first: Sequence[str], second: Sequence[str], places: Sequence[str] = ("training", "validation")
) -> str:
    """Returns the names that only one of two lists of class names has, at most ten of each; else, that their order
    differs. `places` says where each list comes from.
    """
    only = zip(places, (sorted(set(first) - set(second)), sorted(set(second) - set(first))), strict=True)
    texts = [
        f"only in {place}: {', '.join(map(_printable, names[:10]))}{', ...' if names[10:] else ''} ({len(names)})"
        for place, names in only
        if names
    ]
    return "; ".join(texts) or "the same names in another order"


def _printable(name: str) -> str:
    """Returns at most 100 characters of a name, with escapes where it cannot be printed."""
    return (name if name.isprintable() else ascii(name))[:100]
