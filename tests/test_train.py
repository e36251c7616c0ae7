"""Whole runs on the toy data: ranks, micro-batches, small presets, the same bits again, memory, data."""
import gc
import random
import re
import weakref

import numpy as np
import pytest
import torch

import train_gpt
from helpers import TOY, fake_run, init_parameters, toy_of, write_shard

pytestmark = pytest.mark.usefixtures("one_thread")

# 20 steps, half of them with a double batch and longer windows; a loss at every one
STEPS = TOY | dict(
    VALUE_EMBED_LAYERS="1,0", WINDOW_PATTERN="SL", WINDOW_SCHEDULE="16,64",
    BATCH_SCHEDULE="1,2", TRAIN_LOG_EVERY="1", VAL_TOKENS="1500", VAL_LOSS_EVERY="10")
PART = dict(VAL_PART="300", VAL_PART_EVERY="8")     # five of 24 rows


def same_losses(got, want, steps=20):
    """To 1e-4 at every step; the lines have four decimals."""
    assert sorted(got) == sorted(want) == list(range(1, steps + 1))
    assert max(abs(got[step] - want[step]) for step in want) < 1.01e-4


def test_the_trained_model_is_gone_once_the_artifact_is_read_back(train, monkeypatch):
    """And so are its optimizer's moments: scoring has the memory."""
    trained = []
    read_back = train_gpt.write_and_read_back

    def seen(run):
        trained.append(weakref.ref(run.model))
        assert run.optimizer is None and run.loss_fn is None
        return read_back(run)

    def alive(*_):
        gc.collect()
        assert trained[0]() is None
        return "unknown"

    monkeypatch.setattr(train_gpt, "write_and_read_back", seen)
    monkeypatch.setattr(train_gpt, "peak_memory", alive)
    assert train(toy_of("golf"), ITERATIONS="2").code == 0


# -------------------------------------------------------------------------------- ranks and micro-batches
@pytest.fixture(scope="module")
def alone(go):
    """The 20 steps on one rank."""
    done = go(STEPS, **PART)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def short(go):
    """Six steps on one rank."""
    done = go(STEPS, ITERATIONS="6")
    assert done.code == 0, done.err
    return done


def test_one_rank(alone):
    assert alone.losses[1] < np.log(512) and alone.losses[20] < np.log(512) - 1
    assert alone.result["tokens"] == 10 * 1024 + 10 * 2048
    assert [*alone.val_losses] == [0, 10, 20]


def test_two_ranks_agree_with_one(alone, go):
    """... and only rank 0 speaks."""
    two = go(STEPS, ranks=2, **PART)
    assert two.codes == [0, 0], two.err
    same_losses(two.losses, alone.losses)
    parts = [re.findall(r"^val_part step:8 val_loss:(.*)$", run.log, re.M) for run in (two, alone)]
    assert float(parts[0][0]) == pytest.approx(float(parts[1][0]), abs=1e-3) and len(parts[0]) == 1
    assert two.result["val_loss_partial"] == pytest.approx(alone.result["val_loss_partial"], abs=1e-4)
    assert two.result["world_size"] == 2
    assert len(re.findall(r"^step:20/20 train_loss", two.out, re.M)) == 1


@pytest.mark.slow
def test_every_rank_scores_the_artifact(go):
    """Not the weights that it trained: two ranks get what one gets for the file. Wide: its rows are int8."""
    wide = TOY | {"MODEL_DIM": "160", "ITERATIONS": "6", "EMBED_LR": "3", "MATRIX_LR": "0.1",
                  "VAL_BATCH_SIZE": "512"}
    two = go(wide, ranks=2)
    one = go(wide, EVAL_FROM=f"logs/{two.run_id}/final_model.int8.ptz")
    assert two.code == one.code == 0, two.err + one.err
    score = two.result["artifact"]["val_loss"]
    assert abs(two.result["trained"]["val_loss"] - score) > 1e-5, "else the test proves nothing"
    assert score == pytest.approx(one.result["val_loss_partial"], abs=1e-6)


# -------------------------------------------------------------------------------- a public command line
GOLF_LINE = """PRESET=golf VOCAB_SIZE=1024 NUM_LAYERS=9 MODEL_DIM=512 NUM_HEADS=8 NUM_KV_HEADS=4 MLP_MULT=2
    TIE_EMBEDDINGS=1 TRAIN_SEQ_LEN=4096 TRAIN_BATCH_TOKENS=393216 TIED_EMBED_LR=0.030 MATRIX_LR=0.020
    SCALAR_LR=0.020 MUON_MOMENTUM=0.99
    MUON_MOMENTUM_WARMUP_STEPS=1500 MUON_MOMENTUM_WARMUP_START=0.92 WARMDOWN_ITERS=3000 ITERATIONS=20000
    MAX_WALLCLOCK_SECONDS=600 SEED=1337 DATA_PATH=./data/datasets/fineweb10B_sp1024
    TOKENIZER_PATH=./data/tokenizers/fineweb_1024_bpe.model"""


def test_constants_of_the_golf_command_line():
    """It is the preset, but for how the paths are spelled."""
    cfg = train_gpt.load_config(dict(word.split("=") for word in GOLF_LINE.split()))
    assert cfg.preset == "golf" and {*train_gpt.overrides(cfg)} <= {"data_path", "tokenizer_path"}


# -------------------------------------------------------------------------------- the same again
def test_same_seed_same_bits(train):
    """Neither another run nor the warmup before the clock changes a bit; another seed does."""
    steps = STEPS | dict(ITERATIONS="8", VAL_LOSS_EVERY="0", VAL_TOKENS="512")
    first, *others = [train(steps, **more) for more in ({}, dict(WARMUP_STEPS="3"), dict(SEED="1338"))]
    assert [done.code for done in (first, *others)] == [0, 0, 0]
    again, other = others
    assert first.weights == again.weights != other.weights
    assert first.artifact == again.artifact and first.losses == again.losses
    assert first.result["val_loss_partial"] == again.result["val_loss_partial"]


# Little to compile: one plain layer, and no window, stage or validation that asks for another graph
LEAN = dict(NUM_LAYERS="1", BATCH_SCHEDULE="1", WINDOW_SCHEDULE="0", VALUE_EMBED_LAYERS="0", BIGRAM_ROWS="0",
            KEY_OFFSET="0", LOGIT_SOFTCAP="0", UNET_SKIPS="0", VAL_LOSS_EVERY="0")


@pytest.fixture
def compiled_by(monkeypatch):
    """compiled_by(backend): from now on it compiles -> the functions that it was given."""
    compile = torch.compile
    given = []

    def compiled_by(backend):
        def compiled(function, **more):
            given.append(function)
            return compile(function, backend=backend, **more)

        monkeypatch.setattr(torch, "compile", compiled)
        return given

    return compiled_by


def test_a_compiled_run_trains_like_the_uncompiled_one(train, compiled_by):
    """Compiled as far as to graphs of torch's own kernels."""
    given = compiled_by("aot_eager")
    small = STEPS | LEAN | dict(ITERATIONS="4", WARMUP_STEPS="1", TRAIN_BATCH_TOKENS="512", VAL_TOKENS="512",
                                LOGIT_SOFTCAP="15")      # with a cap: FusedLoss
    torch._dynamo.reset()
    fast = train(small, COMPILE="1")
    plain = train(small)
    torch._dynamo.reset()
    assert fast.code == plain.code == 0 and len(given) == 2, fast.out       # the model, Adam's rule
    same_losses(fast.losses, plain.losses, 4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_runs_are_the_same_bits(backend, train, compiled_by):
    """... on two threads, whose race for the embedding's gradient shows at this size unless Team forbids it,
    and train like the uncompiled one."""
    given = compiled_by(backend)
    small = STEPS | LEAN | dict(ITERATIONS="12", WARMUP_STEPS="1", MODEL_DIM="128", TRAIN_SEQ_LEN="256",
                                TRAIN_BATCH_TOKENS="4096", LOGIT_SOFTCAP="15")  # with a cap: FusedLoss
    if backend == "aot_eager":
        small |= dict(ITERATIONS="6", MODEL_DIM="64")
    torch.set_num_threads(2)
    torch._dynamo.reset()
    one, two = (train(small, COMPILE="1") for _ in range(2))
    torch._dynamo.reset()
    assert one.code == two.code == 0 and len(given) == 4, one.out
    assert one.weights == two.weights and one.losses == two.losses
    assert one.result["val_loss_partial"] == two.result["val_loss_partial"]
    same_losses(one.losses, train(small, COMPILE="0").losses, int(small["ITERATIONS"]))
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="both runs would use AVX2")
def test_a_compile_cache_is_not_mixed_by_cpus_with_other_vectors(train, tmp_path, monkeypatch):
    """Inductor's key lacks their width: code for 16 numbers at a time that is built for 8 skips half."""
    cpp = torch._inductor.config.cpp
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    small = STEPS | LEAN | dict(ITERATIONS="4", WARMUP_STEPS="1", MODEL_DIM="64", COMPILE="1")
    runs = []
    width = cpp.simdlen     # restored by hand: monkeypatch would delete it
    for capability in ("avx512", "avx2"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        cpp.simdlen = None  # as a process begins
        torch._dynamo.reset()
        runs.append(train(small))
    cpp.simdlen = width
    torch._dynamo.reset()
    assert [run.code for run in runs] == [0, 0]
    same_losses(runs[0].losses, runs[1].losses, 4)


def test_training_starts_from_bigrams(train, monkeypatch):
    """The first loss is that of bigrams instead of log(vocabulary), unless the vocabulary is too large."""
    short = TOY | dict(ITERATIONS="1", MEMORY="0", WARMUP_STEPS="0")
    drawn, fitted = (train(short, BIGRAM_INIT=on) for on in "01")
    monkeypatch.setattr(train_gpt, "MOST_BIGRAM_VOCAB", 10)
    large = train(short)
    losses = [float(re.search(r"train_loss:(\S+)", run.log)[1]) for run in (drawn, fitted, large)]
    assert losses[0] == losses[2] and losses[1] < losses[0] - 0.3
    assert [run.log.count("made from bigrams") for run in (drawn, fitted, large)] == [0, 1, 0]
    assert ["only up to 10" in run.log for run in (drawn, fitted, large)] == [False, False, True]


def test_the_warmup_leaves_the_init_and_no_trace(tiny_data):
    """Whatever was in model and optimizer; loader and every random generator as they were, to the bit."""
    cfg = train_gpt.load_config(toy_of(
        "speedrun", DATA_PATH=str(tiny_data / TOY["DATA_PATH"]), WARMUP_STEPS="5", SEQ_SCHEDULE="1",
        WINDOW_BLOCK="8", WINDOW_SCHEDULE="16", EVAL_WINDOW="16", WINDOW_PATTERN="SL", MAX_DOC_LEN="20",
        VALUE_EMBED_LAYERS="1,0", SKIP_LAYERS="0,1", BACKOUT_LAYER="1", MAX_EPOCHS="0", BOS_ID="1"))
    team = train_gpt.Team(cfg, {})
    data = train_gpt.open_data(cfg)
    loader = train_gpt.Loader(cfg, data, team)
    model = cfg.make_model()
    init_parameters(model, cfg.seed)
    optimizer = cfg.optimizer()(model, cfg)
    run = fake_run(cfg, model, data, team, micro=16, optimizer=optimizer)
    context = model.context(cfg.train_seq_len, team.device, torch.float32, cfg.stages()[0])
    for _ in range(6):      # until no momentum or second moment is zero
        train_gpt.train_step(model, optimizer, loader.next(cfg.train_batch_tokens), 16, context, 1,
                             train_gpt.Schedule(1.0, 0.9))
    still = [bank.names for bank in optimizer.banks if not all(t.any() for t in (bank.data, *bank.state))]
    assert still == []

    def elsewhere():
        return (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
                loader.position)

    before = elsewhere()
    fresh = cfg.make_model()
    train_gpt.warm_up(run)
    assert run.loss_fn is model and before == elsewhere()
    init_parameters(fresh, cfg.seed)
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), model.parameters(), strict=True))
    assert not any(t.any() for bank in optimizer.banks for t in bank.state)
    assert all(bank.fresh for bank in optimizer.banks)      # the warmup ended between two of Adam's steps
    assert optimizer.step_count == 0


def test_muons_products_are_in_the_dtype_of_activations(train, monkeypatch):
    """On a CPU, where the weights are in fp32."""
    real = train_gpt.orthogonalize
    seen = set()

    def orthogonalize(g, steps, table, given):
        seen.add((g.dtype, given))
        return real(g, steps, table, given)

    monkeypatch.setattr(train_gpt, "orthogonalize", orthogonalize)
    assert train(TOY, DTYPE="bfloat16", ITERATIONS="2", VAL_TOKENS="512").code == 0
    assert seen == {(torch.float32, torch.bfloat16)}


def test_a_step_that_does_not_compile_ends_the_run(train, monkeypatch):
    """Exit 1 before the clock, with what the compiler says."""
    def fails(function, **more):
        def compiled(*args):
            raise RuntimeError("no registers left")
        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    done = train(TOY, COMPILE="1")
    assert done.code == 1 and done.result is None and not done.losses
    assert done.last == "RuntimeError: no registers left"


# -------------------------------------------------------------------------------- memory
def memory_for(monkeypatch, sequences):
    """A model that runs out of memory with more than so many sequences at a time."""
    real = train_gpt.TinyModel.forward

    def forward(self, tokens, *more):
        if len(tokens) > sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(self, tokens, *more)

    monkeypatch.setattr(train_gpt.TinyModel, "forward", forward)


@pytest.mark.parametrize("rows, most, at_once", [
    (12, 99, 12), (12, 12, 12), (12, 11, 6), (12, 5, 4), (12, 1, 1), (12, 0, 1), (7, 6, 1)])
def test_rows_at_once(rows, most, at_once):
    """Micro-batches have one size."""
    assert train_gpt.rows_at_once(rows, most) == at_once


@pytest.mark.parametrize("asked, micro", [("0", 16), ("4", 4), ("5", 5)])
def test_the_micro_batch(asked, micro, train, short, monkeypatch):
    """A rank's whole share on a CPU, unless DEVICE_BATCH_SIZE says less: as much of that as divides it."""
    memory_for(monkeypatch, micro)
    done = train(STEPS, ITERATIONS="6", DEVICE_BATCH_SIZE=asked)
    assert done.code == 0 and done.result["micro_batch"] == micro, done.err
    same_losses(done.losses, short.losses, 6)


def test_too_little_memory_for_one_sequence(train, monkeypatch):
    memory_for(monkeypatch, 0)
    done = train(STEPS)
    assert done.code == 1 and done.result is None
    assert "out of memory" in done.err and len(done.err.strip().splitlines()) == 1


# -------------------------------------------------------------------------------- what is missing, data
def test_epochs_wrap(train, tmp_path):
    """3,000 tokens, 512 a step: the data begins again. No tokenizer: no bpb."""
    rng = np.random.default_rng(0)
    for split, size in (("train_000000", 1700), ("train_000001", 1300), ("val_000000", 400)):
        write_shard(tmp_path / f"foreign_{split}.bin", rng.integers(0, 90, size))
    done = train(TOY, DATA_PATH=str(tmp_path), VOCAB_SIZE="100", VAL_TOKENS="0", ITERATIONS="7",
                 TRAIN_BATCH_TOKENS="512")
    assert done.code == 0, done.err
    assert done.result["tokens"] == 7 * 512
    assert done.result["val_bpb"] is None and done.result["val_loss"] > 0
    assert "\ndata: val_bytes:None\n" in done.out
