"""Predicted times of attention layers on devices that are not here: a roofline, counted operator by operator.

    python -m bench.roofline                                    # all mechanisms: counts, predicted times, crossovers
    python -m bench.roofline --attention eva eva@triton lara --tokens 784 3136 --on h100 l4
    python -m bench.roofline --validate                         # predicted and measured times on one core of this CPU
    python -m bench.roofline --compiled --attention eva lara    # bytes of eager layers, and of the same layers compiled

`bench.devices` has the model and the devices. Predicted times are those of eager layers, without @PATH on the path
"torch". What compiled layers move is counted beside it, from the kernels generated for this CPU.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from attention import Grid
from bench.agreement import Agreement
from bench.arguments import every_mechanism, positive, token_grid
from bench.calibration import CALIBRATION_SAMPLE, ROUNDS
from bench.comparison import Comparison, compare
from bench.devices import CAUTION, CPU, DEVICES, Device, count, predict
from bench.generated import generated
from bench.operators import Operator
from bench.results import describe
from bench.timing import SAMPLE_SECONDS, elapsed
from bench.workload import DTYPES, MODES, Subject, attention_layer
from engine.reporting.tables import compact_table, markdown_table
from engine.runtime.arguments import ArgumentParser
from engine.runtime.distributed import AMP_DTYPE
from engine.runtime.errors import refuse_bad_input
from engine.runtime.files import check_output, to_csv, write_file
from engine.runtime.memory import limit_memory
from engine.runtime.provenance import provenance
from models.costs import Costs

TOKENS = 256 * 784
"""Number of tokens of a batch whose time is predicted."""
SIZES = ((14, 14), (28, 28), (42, 42), (56, 56), (84, 84), (112, 112))
"""Default grids of tokens."""
MEASURED = {(14, 14): 4, (28, 28): 1, (56, 56): 1}
"""Grids of the validation -> images of a call."""


def this_cpu(dtype: str, shape: tuple[int, int]) -> Device:
    """Measures the rates of one core on tensors of a shape: those of a sum, a product and an exponential."""
    x, y, weight, one = torch.randn(shape), torch.randn(shape), torch.randn(shape[1], shape[1]), torch.ones(1)
    half, of_half = (each if dtype == "fp32" else each.to(AMP_DTYPE[dtype]) for each in (x, weight))
    one.requires_grad_()

    def rate(work: float, call: Callable[[], object]) -> float:
        repeats = math.ceil(10 * SAMPLE_SECONDS / elapsed(call, 10, CPU, time.process_time)[0])
        return max(work * repeats / elapsed(call, repeats, CPU, time.process_time)[0] for _ in range(5))

    return Device(
        bandwidth=rate(3 * x.nbytes, lambda: x + y),
        half=rate(2 * x.numel() * shape[1], lambda: half @ of_half),
        single=rate(2 * x.numel() * shape[1], lambda: x @ weight),
        elements=rate(x.numel(), x.exp),
        fused=1.0,
        launch=1 / rate(1, lambda: one + 1),
        source="measured on one core",
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m bench.roofline", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    layers = "NAME[@PATH][:OPTION=VALUE,...]"
    add("--attention", nargs="+", default=["all"], metavar=layers, help="layers beside softmax; default: all")
    add("--on", nargs="+", choices=tuple(DEVICES), default=list(DEVICES), help="devices; default: all")
    add("--tokens", nargs="+", type=token_grid, metavar="N|HxW", help="tokens of an image")
    add("--batch-tokens", type=positive, default=TOKENS, help="tokens of a batch; default: %(default)s")
    add("--dim", type=positive, default=192, help="channels of a layer")
    add("--num-heads", type=positive, default=3, help="heads of a layer")
    add("--mode", choices=[mode for mode in MODES if mode != "train"], default="forward+backward")
    add("--dtype", choices=DTYPES, help="default: bf16; with --validate fp32")
    add("--csv", type=Path, metavar="FILE", help="writes the predictions as a table")
    add("--validate", action="store_true", help="predict this CPU, from measured rates, and time it: one core")
    add("--compiled", action="store_true", help="compile the layers for this CPU and count what they move; minutes")
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or ("fp32" if args.validate else "bf16")
    args.tokens = args.tokens or list(MEASURED if args.validate else SIZES)
    if not args.validate and (most := max(map(math.prod, args.tokens))) > args.batch_tokens:
        parser.error(f"--batch-tokens: {args.batch_tokens} are less than the {most} of an image; give {most} or more")
    if args.csv and args.validate:
        parser.error("--csv writes predictions for other devices; leave it out with --validate")
    if args.on != list(DEVICES) and (args.validate or args.compiled):
        parser.error("--on: --validate and --compiled are of this CPU; leave it out")
    if args.batch_tokens != TOKENS and args.validate:
        parser.error("--batch-tokens: --validate times few images of each size; leave it out")
    if args.validate and args.compiled:
        parser.error("--validate times eager layers; leave it out with --compiled")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    with refuse_bad_input():
        names = every_mechanism(["softmax", *args.attention])
        subjects = [attention_layer(name, args.dim, args.num_heads, "torch") for name in names]
        for subject in subjects:
            if args.validate or args.compiled:
                subject.check_path("compiled" if args.compiled else "eager", CPU)
        costs = {size: [subject.check(size) for subject in subjects] for size in args.tokens}
        if args.csv:
            check_output(args.csv, "--csv", [".csv"])
    if args.validate:
        torch.set_num_threads(1)
        print(describe(provenance(CPU)), flush=True)
        with limit_memory(CPU):
            print(validate(args, subjects, costs))
        return
    if args.compiled:
        torch.set_num_threads(1)
        table = ["tokens", "name", "gb", "operators", "compiled_gb", "kernels"], compiled(args, subjects)
        print(markdown_table(*table))
        if args.csv:
            with refuse_bad_input():
                write_file(args.csv, to_csv(*table))
        return
    devices = {name: DEVICES[name] for name in args.on}
    calls = {}
    with tqdm(total=len(subjects) * len(args.tokens), unit="layer", disable=None) as bar:
        for size in args.tokens:
            for subject in subjects:
                batch = args.batch_tokens // math.prod(size)
                calls[size, subject.name] = count(subject, size, batch, args.mode, args.dtype).found
                bar.update()
    setting = f"{args.mode}, {args.dtype}, eager, up to {args.batch_tokens} tokens in a batch"
    print(f"Predictions, not measurements: {setting}.\n")
    print(*(f"- {name}: {device}" for name, device in devices.items()), f"\n{CAUTION}\n", sep="\n")
    print(counts_table(calls, devices), crossovers(calls, devices), sep="\n\n")
    if args.csv:
        with refuse_bad_input():
            write_file(args.csv, to_csv(*csv_table(calls, devices)))


Calls = Mapping[tuple[Grid, str], Sequence[Operator]]
"""Grid, name of a layer -> the operators of a call."""


def counts_table(calls: Calls, devices: Mapping[str, Device]) -> str:
    """Formats what calls move, compute and launch, and their predicted times and speed-ups over softmax."""
    rows = []
    for (size, name), operators in calls.items():
        flops = {width: sum(o.flops for o in operators if o.dtype.itemsize == width) for width in (2, 4)}
        row = {"tokens": str(math.prod(size)), "name": name, "GB": f"{sum(o.nbytes for o in operators) / 1e9:.1f}"}
        row |= {f"TFLOP, {8 * width} bits": f"{flops[width] / 1e12:.3f}" if flops[width] else "" for width in flops}
        row["operators"] = str(len(operators))
        for device in devices:
            seconds, softmax = (predict(calls[size, each], devices[device]) for each in (name, "softmax"))
            row[f"{device}: ms (speed-up)"] = f"{1e3 * seconds:.2f} ({softmax / seconds:.2f})"
        rows.append(row)
    return compact_table(rows)


def compiled(args: argparse.Namespace, subjects: Sequence[Subject]) -> list[list[str]]:
    """Returns rows of what layers move and launch, eager and compiled for this CPU."""
    rows, setting = [], (args.mode, args.dtype)
    for size in args.tokens:
        for subject in tqdm(subjects, unit="layer", disable=None):
            batch = args.batch_tokens // math.prod(size)
            eager = count(subject, size, batch, *setting).found
            nbytes, kernels = generated(subject, size, batch, *setting)
            row = [str(math.prod(size)), subject.name, f"{sum(o.nbytes for o in eager) / 1e9:.1f}", str(len(eager))]
            rows.append([*row, f"{nbytes / 1e9:.1f}", str(kernels)])
    return rows


def csv_table(calls: Calls, devices: Mapping[str, Device]) -> tuple[list[str], list[list[str]]]:
    """Returns header and rows of a file of GB that calls move, operators, milliseconds and speed-ups over softmax."""
    rows = []
    for (size, name), operators in calls.items():
        row = [str(math.prod(size)), name, f"{sum(o.nbytes for o in operators) / 1e9:.1f}", str(len(operators))]
        for device in devices.values():
            seconds, softmax = (predict(calls[size, each], device) for each in (name, "softmax"))
            row += f"{1e3 * seconds:.2f}", f"{softmax / seconds:.2f}"
        rows.append(row)
    columns = [f"{device}_{column}" for device in devices for column in ("ms", "speedup")]
    return ["tokens", "name", "gb", "operators", *columns], rows


def crossovers(calls: Calls, devices: Mapping[str, Device]) -> str:
    """Formats the least of the sizes from which on layers are predicted to be faster than fused softmax attention."""
    sizes = sorted(dict.fromkeys(size for size, _ in calls), key=math.prod)
    rows = []
    for name in dict.fromkeys(name for _, name in calls if name != "softmax"):
        row = [name]
        for device in devices.values():
            slower = [s for s in sizes if predict(calls[s, name], device) >= predict(calls[s, "softmax"], device)]
            later = sizes[sizes.index(slower[-1]) + 1 :] if slower else sizes
            row.append(str(math.prod(later[0])) if later else f"above {math.prod(sizes[-1])}")
        rows.append(row)
    title = "Tokens from which on a layer is predicted to be faster than fused softmax attention:"
    return f"{title}\n\n{markdown_table(['name', *devices], rows)}"


def validate(args: argparse.Namespace, subjects: Sequence[Subject], costs: Mapping[Grid, Sequence[Costs]]) -> str:
    """Times layers on one core of this CPU in turns, and formats how well the predicted times agree."""
    device, lines = this_cpu(args.dtype, (math.prod(args.tokens[0]) * MEASURED.get(args.tokens[0], 1), args.dim)), []
    pairs: dict[str, list[tuple[float, float]]] = {"all": []}
    for size in args.tokens:
        setting = size, MEASURED.get(size, 1), args.mode, args.dtype
        comparison = Comparison("attention", subjects, "softmax", costs[size], *setting, "eager")
        rows = compare(comparison, ROUNDS, CPU, time.process_time, CALIBRATION_SAMPLE)
        for subject, row in zip(subjects, rows, strict=True):
            if row["seconds"]:
                pair = predict(count(subject, *setting, on_cpu=True).found, device), row["seconds"]
                pairs["all"].append(pair)
                pairs.setdefault(f"{math.prod(size)} tokens", []).append(pair)
                lines.append([subject.name, str(math.prod(size)), *(f"{1e3 * seconds:.2f}" for seconds in pair)])
    table = markdown_table(["name", "tokens", "predicted (ms)", "measured (ms)"], lines)
    found = [f"{name}, {len(each)} layers: {Agreement.of(*zip(*each, strict=True))}" for name, each in pairs.items()]
    return "\n".join([str(device), "", table, "", *found])


if __name__ == "__main__":
    main()
