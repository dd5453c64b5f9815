"""Runs a script of timm on these models: ``python -m models TIMM/train.py --model deit_tiny_p16 ...``.

timm's scripts find models in timm's registry; importing this package registers its models there.
"""

import runpy
import sys

if len(sys.argv) < 2:
    sys.exit("python -m models SCRIPT [ARGUMENT...], where SCRIPT is timm's train.py, validate.py, inference.py, ...")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
