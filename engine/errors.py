"""Errors of input, which whoever started the program can put right."""


class UserError(Exception):
    """Input that cannot be used: a file, a directory, a data set, a device.

    The message names the place, the problem and, where there is one, the remedy; a script prints it in place of a
    traceback. A wrong option has an error that carries its key, `attention.options.OptionError`.
    """


def one_line(text: str, length: int = 500) -> str:
    """`text`, shortened to `length` characters, with escapes for those that cannot be printed."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:length])
    return text if len(text) < length else f"{text[: length - 3]}..."
