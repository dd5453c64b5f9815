"""Errors of input, which whoever started the program can put right."""


class UserError(Exception):
    """Input that cannot be used: a file, a directory, a data set, a device.

    The message names the place, the problem and, where there is one, the remedy; a script prints it in place of a
    traceback. A wrong option has an error that carries its key, `attention.options.OptionError`.
    """
