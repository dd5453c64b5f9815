"""The benchmark of the loader: the same images from every source, and correct ratios."""

import numpy as np
import pytest
import torch

from bench import loading
from bench.results import NOISE
from bench.timing import Times
from engine.data.images import decode
from engine.runtime.distributed import seed_everything

SMALL = np.zeros((3, 4, 4), np.uint8)


def test_every_source_gives_the_same_images(tmp_path):
    sources = loading.open_sources(loading.write_jpegs(tmp_path / "made", 3), tmp_path, 2)
    assert [len(images) for images in sources.values()] == [2] * 8
    plain, full, short, *_ = sources.values()
    for i in range(2):
        assert draw(short, i).shape == (3, 224, 224)
        assert draw(short, i).dtype == np.uint8
        assert np.array_equal(draw(plain, i), draw(full, i))
    assert min(decode(short.reader[0][0]).size) == 256


def test_batched_sources_give_the_same_images_within_a_few_levels(tmp_path):
    sources = loading.open_sources(loading.write_jpegs(tmp_path / "made", 3), tmp_path, 3)
    for name in ("JPEG", "prepared, full size", "prepared, short side 256"):
        seed_everything(0)
        (expected,) = loading.load(sources[name], 3)
        seed_everything(0)
        (drawn,) = loading.load(sources[f"{name}, batched"], 3)
        found = drawn.to(torch.device("cpu"))
        assert found.shape == expected.shape == (3, 3, 224, 224)
        assert (found.float() - expected.float()).abs().mean() < 1


def test_the_policy_is_done_to_the_same_images_every_time(tmp_path):
    sources = loading.open_sources(loading.write_jpegs(tmp_path / "made", 2), tmp_path, 2)
    (batch,) = loading.draw_policy(sources["JPEG, batched"], 2)
    assert batch.groups
    before = batch.images.clone()
    loading.run_policy([batch])
    assert torch.equal(batch.images, before)


def draw(images, index: int) -> np.ndarray:
    seed_everything(0)
    return np.asarray(images[index][0])


def test_the_table_takes_ratios_within_a_round():
    seconds = {"plain": [0.8, 1.6, 0.8], "fast": [0.4, 0.8, 0.4], "noisy": [0.8, 0.2, 3.2]}
    _, plain, fast, noisy, what_noise_is = loading.speed_table(Times(seconds, waited=0.0), 200).splitlines()
    assert plain.split() == ["plain", "250", "~4.00", "(4.00–6.00)", "1.00", "(1.00–1.00)"]
    assert fast.split() == ["fast", "500", "~2.00", "(2.00–3.00)", "2.00", "(2.00–2.00)"]
    assert noisy.split()[4] == "~1.00"
    assert what_noise_is == NOISE
    assert not any(len(row.split()) > 6 for row in (plain, fast))
    _, _, row = loading.speed_table(Times({"a": [0.8, 0.8], "a, batched": [0.2, 0.2]}, waited=0.0), 200).splitlines()
    assert row.split() == ["a,", "batched", "1000", "1.00", "(1.00–1.00)", *["4.00", "(4.00–4.00)"] * 2]
    steady = loading.speed_table(Times({"plain": [0.8, 0.8]}, waited=0.0), 200)
    assert "~" not in steady


def test_sources_are_timed_with_equal_seeds_in_a_round(tmp_path):
    """Rounds have different seeds; the clock is CPU time."""
    sources, seeds = loading.open_sources(loading.write_jpegs(tmp_path / "made", 2), tmp_path, 2), {}
    for name, images in sources.items():
        images.transform = lambda image, name=name: seeds.setdefault(name, []).append(torch.rand(()).item()) or SMALL
    times = loading.time_sources(sources, 2, rounds=2)
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == dict.fromkeys(sources, 2)
    first, *rest = seeds.values()
    assert rest == [first] * 7
    assert len(set(first)) == 2 * 3  # two images; the first pass and the dropped round have the same seed


def test_the_command_runs(capsys):
    loading.main(["--images", "2", "--rounds", "2"])
    lines = [line[:34].strip() for line in capsys.readouterr().out.splitlines()]
    names = ["JPEG", "prepared, full size", "prepared, short side 256"]
    batched = [f"{name}, batched" for name in names]
    parts = ["JPEG, decoded", "JPEG, decoded and cropped", "policy in batches, here"]
    table = lines.index("source")
    assert lines[table + 1 : table + 10] == [*names, *batched, *parts]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["/nowhere"], "data.root: no directory"),
    ],
)
def test_bad_input_is_refused(capsys, arguments, problem):
    with pytest.raises(SystemExit) as ended:
        loading.main(arguments)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err
