"""Runs a script of timm on these models: ``python -m models TIMM/train.py --model deit_tiny_p16 ...``.

timm's scripts find models in timm's registry; importing this package registers its models there. `--plugin MODULE`
loads a plugin, as in every command.
"""

import runpy
import sys
from pathlib import Path

from attention import OptionError
from attention.plugins import take_plugins

try:
    sys.argv = take_plugins(sys.argv[1:])
except OptionError as error:
    sys.exit(f"error: {error}")
if not (sys.argv and Path(sys.argv[0]).is_file()):
    sys.exit("python -m models SCRIPT [ARGUMENT...], where SCRIPT is the file of timm's train.py, validate.py, ...")
runpy.run_path(sys.argv[0], run_name="__main__")
