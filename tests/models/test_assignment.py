"""A mechanism per block: lists whose entries name their blocks, and what a model asks of all its layers."""

import pytest
import timm
import torch

from attention import ATTENTION, AttentionFactory, LayerContext, OptionError
from attention.base import Cost
from models import create_model, parse_model
from models.assignment import assign, mechanisms_of, numbers_of, replace, text_of
from models.base import attention_layers
from models.costs import count_costs
from tests.models.test_models import (
    EVA,
    TINY,
    asks_for_gradients,
    count_graphs,
    families,
    tiny_images,
    tiny_model,
    train_and_evaluate,
)
from tests.support.attention_in_full import resolve_attention
from tests.support.partition import ONE_OF_A_KIND, chosen

SOFTMAX = {"name": "softmax"}
HYBRID = {
    "deit": [{"blocks": [0, 2], **EVA}, {"blocks": 1, **SOFTMAX}],
    "pvtv2_b0": [
        {"stage": 1, "blocks": 1, **SOFTMAX},
        *({"stage": s, "blocks": 0, **EVA} for s in range(3)),
        {"stage": 3, **SOFTMAX},
    ],
}
NAMES = {"deit": ["eva", "softmax", "eva"], "pvtv2_b0": ["eva", "eva", "softmax", "eva", "softmax"]}


def names(model):
    return [layer.name() for layer in attention_layers(model)]


@families
def test_every_block_has_the_mechanism_of_its_entry(name):
    model = tiny_model(name, HYBRID[name])
    assert names(model) == NAMES[name]
    model(tiny_images(name)).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if not parameter.grad.any()] == []
    torch.manual_seed(0)
    same = timm.create_model(name, attention=HYBRID[name], **TINY[name])
    torch.testing.assert_close(same.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_attention_is_written_out():
    given = [{"blocks": [10, 9], **EVA}, {"blocks": "0 - 7,8", "name": "local"}, {"name": "softmax", "blocks": 11}]
    resolved = [{"blocks": "9-10", **EVA}, {"blocks": "0-8", "name": "local"}, {"blocks": "11", **SOFTMAX}]
    assert resolve_attention("deit", given) == resolve_attention("deit", resolved) == resolved
    assert resolve_attention("deit", [{"blocks": 0, **EVA}], {"depth": 1}) == [{"blocks": "0", **EVA}]
    stages = [{"stage": 3, **SOFTMAX}, {"stage": 0, **EVA}, {"stage": 2, "blocks": [1, 0], **EVA}, {"stage": 1, **EVA}]
    written = [*stages[:2], {"stage": 2, "blocks": "0-1", **EVA}, stages[3]]
    assert resolve_attention("pvtv2_b0", stages) == written
    assert mechanisms_of(written) == [SOFTMAX, EVA, EVA, EVA]
    assert mechanisms_of("eva") == [{"name": "eva"}]


def test_numbers_of_blocks():
    for blocks, numbers in [(3, [3]), ("3", [3]), ([4, 1], [1, 4]), ("0-2", [0, 1, 2]), (" 5, 0-1 ", [0, 1, 5])]:
        assert numbers_of(blocks, 6, "blocks") == numbers
        assert numbers_of(text_of(numbers), 6, "blocks") == numbers
    assert text_of([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def by_block(*blocks):
    return [{"blocks": given, "name": "softmax"} for given in blocks]


BLOCKS = "attention[0].blocks"
REFUSED = [
    ("deit", by_block("0-8"), "attention: no entry has blocks 9-11; every block has one mechanism"),
    ("deit", by_block("0-4, 6-11"), "attention: no entry has block 5; every block has one mechanism"),
    ("deit", by_block("0-8", "7-11"), "attention[1]: blocks 7-8 in attention[0] as well; every block has one mech"),
    ("deit", by_block("0-12"), f"{BLOCKS} = '0-12': there is no block 12; there are 0 to 11"),
    ("deit", by_block([0, -1]), f"{BLOCKS} = (0, -1): there is no block -1; there are 0 to 11"),
    ("deit", by_block([1, 2, 1]), f"{BLOCKS} = (1, 2, 1): names block 1 twice; name every block once"),
    ("deit", by_block("0-3, 2"), f"{BLOCKS} = '0-3, 2': names block 2 twice; name every block once"),
    ("deit", by_block([]), f"{BLOCKS} = (): names no block; leave the entry out"),
    ("deit", by_block(None), f"{BLOCKS} = null: name blocks, such as 0-8"),
    ("deit", by_block("8-0"), f"{BLOCKS} = '8-0': expected a number, a range as 0-8, or several of them as 0-3, 7"),
    ("deit", by_block("all"), f"{BLOCKS} = 'all': expected a number, a range as 0-8, or several of them as 0-3, 7"),
    ("deit", by_block(True), f"{BLOCKS}: expected a list, got True"),
    ("deit", [{"blocks": 0, "name": "sofmax"}], "attention[0].name: unknown mechanism 'sofmax'; did you mean 'soft"),
    ("deit", [{"blocks": "0-11"}], "attention[0]: expected a mechanism's name or a mapping with one, got {}"),
    ("deit", [*by_block("0-8"), "eva"], "attention: deit takes one mechanism or a list of mappings that name their bl"),
    ("deit", [], "attention: deit takes one mechanism or a list of mappings that name their blocks, got []"),
    ("deit", {"blocks": "0-11", **SOFTMAX}, "attention.blocks: belongs to an entry of a list, attention: [{blocks: 0-"),
    ("deit", [{"stage": 0, **SOFTMAX}], "attention[0].stage = 0: this model has no stages; leave it out"),
    ("pvtv2_b0", by_block("0-7"), "attention[0].stage = null: name a stage, 0 to 3"),
    ("pvtv2_b0", [{"stage": 4, **SOFTMAX}], "attention[0].stage = 4: name a stage, 0 to 3"),
    ("pvtv2_b0", [{"stage": "1", **SOFTMAX}], "attention[0].stage: expected int, got '1'"),
    ("pvtv2_b0", [{"stage": 1, "blocks": 2, **SOFTMAX}], f"{BLOCKS} = 2: there is no block 2; there are 0 to 1"),
    (
        "pvtv2_b0",
        [{"stage": 0, **SOFTMAX}, {"stage": 0, "blocks": 1, **SOFTMAX}],
        "attention[1]: block 1 of stage 0 in attention[0] as well; every block has one mechanism",
    ),
    (
        "pvtv2_b0",
        [{"stage": 0, **SOFTMAX}, {"stage": 2, "blocks": 0, **SOFTMAX}, {"stage": 3, **SOFTMAX}],
        "attention: no entry has blocks 0-1 of stage 1 and block 1 of stage 2; every block has one mechanism",
    ),
]


@pytest.mark.parametrize(("name", "attention", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_errors_name_key_value_and_remedy(name, attention, message):
    with pytest.raises(OptionError) as error:
        resolve_attention(name, attention)
    assert str(error.value).startswith(message)
    with pytest.raises(OptionError):
        create_model(name, attention, device="meta")


def test_blocks_are_replaced():
    config = parse_model("pvtv2_b0", TINY["pvtv2_b0"])
    entries = assign("pvtv2_b0", EVA, config.depths)
    changed = replace(entries, config.depths, {"stage": 1, "blocks": "1"}, SOFTMAX, "--")
    assert [entry.layers for entry in changed] == [(0,), (1,), (3,), (4,), (2,)]
    assert resolve_attention("pvtv2_b0", [entry.options for entry in changed], TINY["pvtv2_b0"]) == [
        {"stage": 0, "blocks": "0", **EVA},
        {"stage": 1, "blocks": "0", **EVA},
        {"stage": 2, "blocks": "0", **EVA},
        {"stage": 3, "blocks": "0", **SOFTMAX},
        {"stage": 1, "blocks": "1", **SOFTMAX},
    ]
    whole = replace(entries, config.depths, {"stage": 1}, SOFTMAX, "--")
    assert whole[-1][:2] == ({"stage": 1, **SOFTMAX}, (1, 2))
    for place, message in [
        ({"blocks": "0"}, "--stage = null: name a stage, 0 to 3"),
        ({"stage": 4}, "--stage = 4: name"),
    ]:
        with pytest.raises(OptionError, match=message):
            replace(entries, config.depths, place, SOFTMAX, "--")


EQUALS = {
    "deit": lambda one: [{"blocks": "0, 2", **one}, {"blocks": 1, **one}],
    "pvtv2_b0": lambda one: [
        {"stage": 1, "blocks": 1, **one},
        *({"stage": s, "blocks": 0, **one} for s in range(3)),
        {"stage": 3, **SOFTMAX},
    ],
}
SIDES = {"deit": 64, "pvtv2_b0": 112}


@families
@pytest.mark.parametrize(
    "one",
    chosen(
        [*({"name": name} for name in ATTENTION), {"name": "linformer", "sharing": "layers"}],
        lambda one: one["name"] in (*ONE_OF_A_KIND, "linformer"),
    ),
    ids=str,
)
def test_a_list_of_equals_is_the_single_mechanism_bit_for_bit(name, one):
    """Weights, outputs in training, and random numbers drawn for both."""
    images = torch.randn(2, 3, SIDES[name], SIDES[name], generator=torch.Generator().manual_seed(1))
    found = []
    for attention in (one, EQUALS[name](one)):
        model = tiny_model(name, attention, img_size=SIDES[name])
        found.append([model.state_dict(), torch.get_rng_state(), model(images), torch.get_rng_state()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_layers_that_alternate_or_change_in_the_middle_do_so_over_their_mechanism_or_the_network():
    """Windows that softmax separates still cross each other's borders; in the first of them nothing is shifted."""
    options = TINY["deit"] | {"depth": 6}
    shifted = {"name": "shifted_window", "window_size": 3}
    model = create_model("deit", [{"blocks": "1, 3-5", **shifted}, {"blocks": "0, 2", **SOFTMAX}], **options)
    shifts = [getattr(layer, "shifts", None) for layer in attention_layers(model)]
    assert shifts == [None, False, None, True, False, True]
    others = {**shifted, "window_size": 2}
    model = create_model("deit", [{"blocks": "0-2", **shifted}, {"blocks": "3-5", **others}], **options)
    assert [layer.shifts for layer in attention_layers(model)] == [False, True] * 3
    one = {"name": "transnormer", "window_size": 3}  # windows in the first half of the network
    model = create_model("deit", [{"blocks": "2-5", **one}, {"blocks": "0-1", **SOFTMAX}], **options)
    assert [layer.in_windows for layer in attention_layers(model)[2:]] == [True, False, False, False]


@families
def test_costs_are_sums(name):
    """They follow from the costs of the layers, stated and counted."""
    model = {"name": name, **TINY[name]}
    counted = count_costs(model, HYBRID[name])
    base = count_costs(model, ["softmax"] * 4 if name != "deit" else "softmax")
    config, contexts = parse_model(name, TINY[name]), []
    if name == "deit":
        contexts = [{"dim": 24, "num_heads": 3, "grid": (6, 5)}] * 3
    else:
        for s, depth in enumerate(config.depths):
            grid = (16 >> s, 24 >> s)
            contexts += [{"dim": config.embed_dims[s], "num_heads": config.num_heads[s], "grid": grid}] * depth
    expected = Cost(*base)
    for mechanism, context in zip(NAMES[name], contexts, strict=True):
        if mechanism == "eva":
            eva, softmax = (
                ATTENTION[factory.name].layer_cost(LayerContext(**context), factory.config)
                for factory in map(AttentionFactory.from_options, (EVA, SOFTMAX))
            )
            expected = Cost(*(total + a - b for total, a, b in zip(expected, eva, softmax, strict=True)))
    assert tuple(counted) == expected


def test_key_masks_are_taken_if_every_layer_takes_them():
    images = tiny_images("deit").double()
    mask = torch.ones(2, 6, 5, dtype=torch.bool)
    mask[:, 4:] = False
    model = tiny_model("deit", [{"blocks": "0-1", **SOFTMAX}, {"blocks": 2, "name": "linear"}]).double().eval()
    hidden = images.clone()
    hidden[:, :, 32:] = 7
    torch.testing.assert_close(model(hidden, mask), model(images, mask), rtol=0, atol=1e-9)
    agent = {"blocks": 2, "name": "agent", "num_landmarks": 4}
    model = tiny_model("deit", [{"blocks": "0-1", **SOFTMAX}, agent]).double()
    with pytest.raises(ValueError, match=r"attention\(agent\): takes no key_mask"):
        model(images, mask)


@pytest.mark.complete
@asks_for_gradients
def test_blocks_of_a_kind_are_one_graph_per_mode():
    """Two kinds, in training and in evaluation, and in training the first block, which begins with no addition."""
    model = tiny_model("deit", HYBRID["deit"], drop_path_rate=0.3)
    assert count_graphs(model, lambda model: train_and_evaluate(model, tiny_images("deit"))) == 5
