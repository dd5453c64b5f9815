"""Sweeps: YAML -> rows -> settings -> runs -> table and figures. Each module uses those above it:

- `match`: sizes of mechanisms at equal multiply-accumulates.
- `runs`: a run, its command and its result; a setting, a row of the table, which has a run for each seed or fold.
- `schema`: the options of the file, and its rows. `sweep`: rows -> settings, all checked.
- `worker`: trains the runs.
- `names`, `tables`, `figures` and `report`: settings -> texts and files.
"""
