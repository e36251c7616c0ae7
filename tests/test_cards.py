"""The table of cards: names as torch tells them, peaks, and that every card has what `static` needs."""

import pytest

import train_gpt
from tools.run import cards, plan

NAMES = [*[(card.name, key) for key, card in cards.CARDS.items()], ("NVIDIA A100-PCIE-40GB", "a100"),
         ("NVIDIA H200 NVL", ""), ("NVIDIA H100 PCIe", ""), ("NVIDIA GB200", ""), ("NVIDIA L40S", ""),
         ("NVIDIA GeForce RTX 3090 Ti", ""), ("NVIDIA GeForce RTX 5090 Laptop GPU", ""),
         ("NVIDIA GeForce RTX 5090 D", ""), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""), ("NVIDIA T400", "")]


@pytest.mark.parametrize("name, key", NAMES)
def test_a_card_is_known_by_its_name(name, key):
    """A part of a card, and one that only begins like another, is not."""
    assert cards.card_of(name) == key


def test_peaks_are_dense_and_of_the_card():
    peaks = {key: cards.peak_flops(card.name) / 1e12 for key, card in cards.CARDS.items()}
    assert peaks == pytest.approx({
        "h100": 989.4, "h200": 989.4, "a100": 312, "b200": 2250, "b300": 2250, "5090": 209.5,
        "pro6000": 503.8, "4090": 165.2, "3090": 71, "l4": 121, "t4": 0})
    assert cards.peak_flops("NVIDIA H200 NVL") == 835.5e12 and cards.peak_flops("NVIDIA Made Up") == 0
    for key, card in cards.CARDS.items():
        assert card.fp8_peak == pytest.approx(2 * card.peak, rel=1e-3) or not card.fp8_peak, key
        assert (card.fp8_peak > 0) == (card.capability >= 89), key
        assert (card.peak > 0) == (card.capability >= 80), key


def test_an_sm_holds_what_its_compute_capability_says():
    for key, card in cards.CARDS.items():
        threads = {75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 103: 2048, 120: 1536}
        shared = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
        assert card.threads == threads[card.capability], key
        assert card.shared == 1024 * shared[card.capability], key


EIGHT = "8x NVIDIA H100 80GB HBM3"


def result_of(preset, hardware, rate, steps):
    config = {name: train_gpt.show(value) for name, value in vars(train_gpt.preset_config(preset)).items()}
    return dict(preset=preset, config=config, hardware=hardware, tok_per_s=rate, steps=steps)


def mfu(result):
    return cards.mfu_text(plan.work_of(result))


def test_mfu_of_a_run():
    """golf's 49,152 tokens in 35.7 ms on an H100; of eight it is the same at eight times the rate. The
    speedrun's tokens cost more in later stages, whose windows are larger."""
    rate = 49_152 / 0.0357
    for gpus in (1, 8):
        text = mfu(result_of("golf", f"{gpus}x NVIDIA H100 80GB HBM3", gpus * rate, 8000))
        assert text == f"mfu:0.457 in bf16, of {gpus} x 989 TFLOP/s"
    early, late = [float(mfu(result_of("speedrun", EIGHT, 4e6, steps))[4:9]) for steps in (300, 2160)]
    assert 0.2 < early < late < 0.5
    fp8 = result_of("gpt2", EIGHT, 1e6, 100)
    assert mfu(fp8).endswith(" in fp8, of 8 x 1979 TFLOP/s")
    uncapped = fp8 | dict(config=fp8["config"] | dict(logit_softcap="0"))
    assert mfu(uncapped).endswith(" in bf16, of 8 x 989 TFLOP/s")
    assert mfu(fp8 | dict(hardware="8x NVIDIA A100-SXM4-80GB")).endswith(" in bf16, of 8 x 312 TFLOP/s")
    assert mfu(result_of("golf", "1x NVIDIA Made Up", 1e6, 9)).startswith("mfu:? of NVIDIA Made Up, ")
    assert plan.work_of(result_of("tiny", "2 ranks x 1 threads of AMD EPYC", 1e4, 9)) is None


@pytest.mark.parametrize("preset", train_gpt.RECIPES)
def test_a_result_gives_the_configuration_back(preset):
    """Also that of a depth, which is no horizon a second time."""
    assert mfu(result_of(preset, EIGHT, 1e6, 100)).startswith("mfu:0.")
