"""The progress bar of training and evaluation."""

from tqdm import tqdm


def progress_bar(title: str, total: int | None, *, initial: int = 0, leave: bool = True, hidden: bool = False) -> tqdm:
    """A bar that counts images and is as wide as the terminal; none where stderr is no terminal.

    It shows the title, the share done, the time left, images per second, and last what `set_postfix_str` adds.

    Args:
        total: images in all; None: unknown. leave: it stays on the screen when it is closed. hidden: show none at all.
    """
    return tqdm(
        desc=title,
        total=total,
        initial=initial,
        leave=leave,
        disable=hidden or None,  # None: unless stderr is a terminal
        dynamic_ncols=True,
        unit=" images",
        unit_scale=True,
        bar_format="{l_bar}{bar}| ETA {remaining}, {rate_noinv_fmt}{postfix}",
    )
