"""Names that are typed: what a preset takes, what other scripts call the same, slips of the keyboard."""
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from tools.run.machine import RANKS
from train_gpt import RECIPES, Refused, fields, recipe_of, require

OF_LAUNCHERS = (*RANKS, "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "NNODES", "NODE_RANK")
OF_RUN_SH = ("DRY_RUN", "SCRIPT", "PROXY", "RESTARTS", "LOGGER", "HELP")  # what it takes besides constants
# Constants of a record's public script that our recipe lacks: {preset: {name: the value built in; None: any}}
UNUSED: dict[str, dict[str, str | None]] = {
    "golf": dict(TIE_EMBEDDINGS="1", EMBED_LR=None, HEAD_LR=None),
    "golf_plus": dict(TIE_EMBEDDINGS="1", EMBED_LR=None, HEAD_LR=None),
    "gpt2": dict(SAMPLE_EVERY=None),
    "gpt2_plus": dict(SAMPLE_EVERY=None)}
# What other scripts, nanoGPT and nanochat among them, call our constants
RATES = ("MATRIX_LR", "EMBED_LR", "TIED_EMBED_LR", "HEAD_LR", "SCALAR_LR", "GATE_LR")
BATCH = ("TRAIN_BATCH_TOKENS", "DEVICE_BATCH_SIZE")
ELSEWHERE = dict(
    LEARNING_RATE=RATES, LR=RATES, MAX_LR=RATES, EMBEDDING_LR=RATES[1:3], UNEMBEDDING_LR=RATES[3:4],
    BATCH_SIZE=BATCH, MICRO_BATCH_SIZE=BATCH[1:], GRADIENT_ACCUMULATION_STEPS=BATCH[1:],
    MOMENTUM=("MUON_MOMENTUM",), N_LAYER=("NUM_LAYERS",), N_EMBD=("MODEL_DIM",), N_HEAD=("NUM_HEADS",),
    N_KV_HEAD=("NUM_KV_HEADS",), BLOCK_SIZE=("TRAIN_SEQ_LEN",), SEQ_LEN=("TRAIN_SEQ_LEN",),
    MAX_SEQ_LEN=("TRAIN_SEQ_LEN",), NUM_SCHEDULED_ITERATIONS=("ITERATIONS",), MAX_ITERS=("ITERATIONS",),
    STEPS=("ITERATIONS",),
    EPOCHS=("MAX_EPOCHS",), WARMUP_ITERS=("LR_WARMUP_STEPS",), GRAD_CLIP=("GRAD_CLIP_NORM",),
    WARMDOWN_RATIO=("WARMDOWN_FRAC", "WARMDOWN_ITERS"), EVAL_INTERVAL=("VAL_LOSS_EVERY",),
    EVAL_EVERY=("VAL_LOSS_EVERY",), EVAL_TOKENS=("VAL_TOKENS",), DATASET=("DATA_PATH",),
    DEVICE_TYPE=("DEVICE",))
# What scripts of parameter-golf take and no recipe of ours does
OF_GOLF_SCRIPTS = {
    "QUANT_BITS", "MUON_WD", "MUON_WEIGHT_DECAY", "EMA_ENABLED", "SWA_ENABLED", "SWA_EVERY", "TTT_ENABLED",
    "BIGRAM_VOCAB_SIZE", "XSA_LAST_N", "LATE_QAT", "ROPE_DIMS", "LN_SCALE"}


def constants_of(preset: str) -> set[str]:
    """The names that a preset takes, in capitals, second names among them."""
    recipe = recipe_of(preset)
    return {name.upper() for name in [*[f.name for f in fields(recipe)], *recipe.aliases.values()]}


class Word(NamedTuple):
    """An argument."""
    typed: str  # as it was, less its value
    name: str  # MATRIX_LR for --matrix-lr; PRESET for a preset's name
    text: str | None  # its value; None: there is none


def parse(words: Sequence[str]) -> list[Word]:
    """What is on a command line: a preset, NAME=value, --name=value, --name value, --name."""
    found = []
    waiting = [*words]
    while waiting:
        word = waiting.pop(0)
        typed, equals, text = word.partition("=")
        name = typed.lstrip("-").replace("-", "_").upper()
        if word in RECIPES:
            found.append(Word(typed, "PRESET", word))
        elif equals:
            found.append(Word(typed, name, text))
        elif typed.startswith("--") and waiting and not waiting[0].startswith("--"):
            found.append(Word(typed, name, waiting.pop(0)))
        else:
            found.append(Word(typed, name, None))
    return found


# ---------------------------------------------------------------- what was meant
def meant_by(preset: str, name: str, others: Sequence[str] = ()) -> list[str]:
    """Constants of the preset that a name probably means: as other scripts call them, else one that is a slip
    away. others: further names that could be meant."""
    own = constants_of(preset)
    elsewhere = [constant for constant in ELSEWHERE.get(name.upper(), ()) if constant in own]
    close = get_close_matches(name.upper(), sorted({*own, *others}), 3, 0.75)
    return elsewhere or [known for known in close if abs(len(known) - len(name)) < 2][:1]


def did_you_mean(names: Sequence[str]) -> str:
    *others, last = names
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?"


def why_not_here(preset: str, name: str) -> str:
    """Why the preset lacks a constant that others have; empty if it is none anywhere."""
    owners = [other for other in RECIPES if name in constants_of(other)]
    if owners:
        return f"{preset} has no such constant, only {', '.join(owners)}"
    if name in OF_GOLF_SCRIPTS:
        return f"{preset} has no such constant; ./run.sh {preset} --help lists its own"
    return ""


def about_argument(preset: str, word: Word) -> str:
    """The end of the sentence that refuses an argument."""
    own = constants_of(preset)
    if word.name not in own and why_not_here(preset, word.name):
        return why_not_here(preset, word.name)
    presets = get_close_matches(word.typed, RECIPES, 1, 0.75)
    if presets:
        return did_you_mean(presets)
    longer = [known for known in sorted(own) if word.name and known.startswith(word.name)]
    meant = meant_by(preset, word.name, OF_RUN_SH) or longer[:1]
    if not meant:
        return f"./run.sh help lists commands, ./run.sh {preset} --help constants"
    return did_you_mean([as_flag(known) for known in meant])


# ---------------------------------------------------------------- the command line and the environment
def as_flag(name: str) -> str:
    return f"--{name.lower().replace('_', '-')}"


def check_built_in(preset: str, name: str, text: str | None) -> str:
    """The line about a constant that only the record's public script has. Raises Refused for another value
    than the one that is built into our recipe."""
    wanted = UNUSED[preset][name]
    require(wanted in (None, text), f"{name}={text}: in {preset} it is always {wanted}")
    return f"{name}: accepted, as the public script has it; {preset} does not need it"


def text_of(name: str, env: Mapping[str, str], words: Sequence[str]) -> str:
    """What was last typed for a constant, or what the environment has for it; empty: nothing."""
    typed = [word.text for word in parse(words) if word.name == name and word.text is not None]
    return [env.get(name, ""), *typed][-1]


def trainer_flags(env: Mapping[str, str], words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """What was typed -> (preset, flags that the trainer takes, lines about what it does not need). Raises
    Refused for what the preset lacks, with what was probably meant."""
    line = parse(words)
    preset = text_of("PRESET", env, words) or next(iter(RECIPES))
    own = constants_of(preset)
    flags = []
    lines = []
    for word in line:
        if word.name in own and (word.text is not None or word.typed.startswith("--")):
            flags.append(as_flag(word.name) + ("" if word.text is None else f"={word.text}"))
        elif word.name in UNUSED.get(preset, {}):
            lines.append(check_built_in(preset, word.name, word.text))
        elif word.name in OF_LAUNCHERS:
            raise Refused(f"{word.typed} is a launcher's: start with torchrun --nproc_per_node=GPUS "
                          "train_gpt.py, which sets RANK, WORLD_SIZE and LOCAL_RANK")
        else:
            raise Refused(f"unknown argument {word.typed}: {about_argument(preset, word)}")
    return preset, flags, lines


def check_variables(preset: str, env: Mapping[str, str]) -> list[str]:
    """Lines about variables of the environment that the preset does not heed, although they are constants
    elsewhere or a slip away from one. Raises Refused for a value that the preset contradicts."""
    own = constants_of(preset)
    lines = []
    for name, text in env.items():
        if name in own:
            continue
        elsewhere = why_not_here(preset, name)
        meant = meant_by(preset, name)
        if name in UNUSED.get(preset, {}):
            lines.append(check_built_in(preset, name, text))
        elif elsewhere:
            lines.append(f"warning: {name} in the environment: {elsewhere}")
        elif meant:
            lines.append(f"warning: {name} in the environment is no constant; {did_you_mean(meant)}")
    return lines
