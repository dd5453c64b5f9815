"""Text for people: one printable line, Unicode's normal form, and the difference between two lists of names."""

import unicodedata
from collections.abc import Sequence


def one_line(text: str, length: int = 500) -> str:
    """Returns `text` shortened to `length` characters, with escapes for characters that cannot be printed."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return text if len(text) < length else f"{text[: length - 3]}..."


def describe_error(error: BaseException) -> str:
    """Returns the class and the message of `error` in one printable line of at most 200 characters."""
    return one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)


def describe_difference(
    first: Sequence[str], second: Sequence[str], places: Sequence[str] = ("training", "validation")
) -> str:
    """Returns the names that only one of two lists of class names has, at most ten of each; else, that their order
    differs. `places` says where each list comes from.
    """
    first, second = (sorted({*names} - {*others}) for names, others in ((first, second), (second, first)))
    texts = [
        f"only in {place}: {', '.join(one_line(x, 100) for x in names[:10])}{', ...' * bool(names[10:])} ({len(names)})"
        for place, names in zip(places, (first, second), strict=True)
        if names
    ]
    return "; ".join(texts) or "the same names in another order"


def numbers_of(names: Sequence[str], known: Sequence[str]) -> list[int] | None:
    """Returns `names` as numbers, if they are 0 to n - 1 in any order and none of them is one of the n `known` names:
    positions among these; otherwise None."""
    numbers = [int(name) if name.isdecimal() else -1 for name in names]
    return numbers if sorted(numbers) == [*range(len(known))] and {*names}.isdisjoint(known) else None


def to_nfc(text: str) -> str:
    """Returns `text` in Unicode's normal form NFC; macOS writes accented letters in another form."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def names_to_nfc(names: Sequence[str]) -> list[str]:
    """Returns names of classes in NFC; as they are, where two of them would become one."""
    composed = [*map(to_nfc, names)]
    return composed if len({*composed}) == len({*names}) else [*names]
