"""Notes below the table of a sweep."""

from collections import Counter
from collections.abc import Sequence

from ablation.cases import Case
from ablation.settings import Setting, has_replicates, in_order, replicate_of
from ablation.short_names import short_names
from ablation.tables import Table

ONE_RUN = (
    "One run per row: how far other seeds would end from it is not known, and rows that are near cannot be ranked."
)
REPLICATES = (
    "± is the standard deviation over {0}s. Differences are to the first row, between runs of the same {0}, and noise"
    " where the 95 % interval of Student's t over them contains 0; their standard deviation is taken as at"
    " least one image, because accuracies are multiples of one image (row by row: of 20 rows without an effect, one"
    " will seem to have one)."
)

FOLDS = (
    "Each fold is another part of the training images, which its run validates on. Runs of different folds share"
    " training images, so that the standard deviation over folds is too small (Bengio and Grandvalet: No unbiased"
    " estimator of the variance of k-fold cross-validation, JMLR 2004)."
)


def list_notes(settings: Sequence[Setting], table: Table, left_out: Sequence[str]) -> list[str]:
    """Returns the notes below a table: how reliable its numbers are, and what is not as its row says."""
    replicate, num_runs = replicate_of(settings), settings[0].num_runs
    notes = [REPLICATES.format(replicate) if has_replicates(settings) else ONE_RUN] + [FOLDS] * (replicate == "fold")
    counts = set(map(int, table.get(f"{replicate}s", [])))
    if len(counts) == 1 and 0 < max(counts) < num_runs and not all(map(Case.outcome, in_order(settings))):
        notes.append(f"Not finished: every row has {max(counts)} of its {num_runs} runs.")
    for name, setting in zip(short_names(settings), settings, strict=True):
        notes += [f"{name}: {line}." for line in describe_lost(setting)]
        if setting.paper and setting.paper.note:
            notes.append(f"{name}, not as the paper prints it: {setting.paper.note}.")
    for case in in_order(settings):
        if changes := case.changes():
            notes.append(f"{case.directory.name} changed options during training: {'; '.join(changes)}.")
    return notes + [f"Left out: {line}." for line in left_out]


def describe_lost(setting: Setting) -> list[str]:
    """Returns a text for the runs of a setting that have diverged, and one for those that have failed otherwise."""
    outcomes, lines = Counter(map(Case.outcome, setting.cases)), []
    for outcome in ("diverged", "failed"):
        if count := outcomes[outcome]:
            has, takes = ("has", "takes") if count == 1 else ("have", "take")
            lines.append(f"{count} of {setting.num_runs} runs {has} {outcome} and {takes} no part")
    return lines
