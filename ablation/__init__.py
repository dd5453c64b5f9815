"""Sweeps: a YAML file becomes settings, their runs, and tables and figures of the results.

Each module uses those above it:

- `schema`: the options of the file, and how its keys name options of train.py.
- `match`: sizes of mechanisms at equal multiply-accumulates.
- `cases`: a run, its command and its result. `settings`: a row of the table, which has a run for each seed or fold.
- `names`: short names of settings.
- `sweep`: file -> settings, all checked.
- `worker`: trains the runs.
- `tables`, `figures` and `report`: settings -> files.
"""
