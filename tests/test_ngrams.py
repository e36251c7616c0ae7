"""The n-gram embedding: which rows n-grams have, that a step costs what it touches, ranks, files."""

from dataclasses import replace

import pytest
import torch

import train_gpt
from helpers import TOY, fake_team, init_parameters
from test_model import randomised
from test_optimizer import SMALL
from train_gpt import Optimizer, SparseTable, make_context, ngram_ids, train_step

pytestmark = pytest.mark.usefixtures("one_thread")
CFG = replace(SMALL, ngram_rows=301, ngram_orders=(1, 2, 4), bigram_rows=0, max_doc_len=16, bos_id=1)


def some_tokens(step, rows=6, cfg=CFG):
    """Few different ones, so that n-grams come again, and some that begin documents."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 9, (rows, cfg.train_seq_len), generator=generator)


def context_of(cfg):
    return make_context(cfg, cfg.train_seq_len, 0, torch.device("cpu"))


@pytest.mark.parametrize("documents", [True, False])
def test_equal_ngrams_have_one_row(documents):
    """Of all places in 40 rows of tokens; those without n tokens of their document have the last row."""
    cfg = replace(CFG, ngram_rows=1 << 26, ngram_orders=(1, 3, 5), max_doc_len=16 * documents)
    tokens, found = some_tokens(0, 40), {}
    ids = ngram_ids(tokens, randomised(replace(cfg, ngram_rows=9)).documents(tokens), cfg)
    for i, row in enumerate(tokens.tolist()):
        for t in range(len(row)):
            for k, n in enumerate(cfg.ngram_orders):
                gram, place = tuple(row[max(0, t + 1 - n):t + 1]), int(ids[i, t, k])
                whole = len(gram) == n and not (documents and 1 in gram[1:])
                assert whole == (place != cfg.ngram_rows)
                if whole:
                    assert found.setdefault(gram, place) == place
    assert len({*found.values()}) == len(found) > 400       # no collision in so large a table


def test_rows_are_used_alike():
    """The hash spreads natural counts evenly: a table with a row per pair is filled to about 1 - 1/e."""
    cfg = replace(CFG, ngram_rows=10_000, ngram_orders=(2,), max_doc_len=0)
    pairs = torch.cartesian_prod(torch.arange(100), torch.arange(100))
    used = ngram_ids(pairs, None, cfg)[:, 1].unique()
    assert 0.58 < len(used) / 10_000 < 0.70


def test_looked_up_before_or_within():
    model, tokens, context = randomised(CFG), some_tokens(1), context_of(CFG)
    ids, found = model.look_up(tokens)
    within = model.hidden(tokens, context)
    assert torch.equal(within, model.hidden(tokens, context._replace(ngrams=found)))
    assert not torch.allclose(within, model.hidden(tokens, context._replace(ngrams=0 * found)))
    plain = torch.stack([model.ngram_embed[ids[..., k]] for k in range(3)]).sum(0)
    assert torch.allclose(found, plain)


def trained(cfg, steps):
    """(model, optimizer) after so many steps of two micro-steps."""
    model = randomised(cfg)
    model.ngram_embed.data.zero_()
    optimizer = Optimizer(model, cfg)
    for step in range(steps):
        tokens = some_tokens(step, 12)
        train_step(model, optimizer, (tokens, tokens.roll(-1, 1)), 6, context_of(cfg), 1, 0.7, 0.9)
    return model, optimizer


def test_a_step_is_that_of_a_whole_table():
    """By the gradient of the whole table, as autograd has it without a table of its own: the row-wise rule of
    the docstring, written with dense tensors; two micro-steps add up."""
    twin, v = randomised(CFG), torch.zeros(CFG.ngram_rows + 1)
    twin.ngram_embed.data.zero_()
    rest = Optimizer(twin, CFG)
    for step in range(4):
        tokens = some_tokens(step, 12)
        loss = sum(twin(part, part.roll(-1, 1), context_of(CFG)) for part in tokens.chunk(2)) / 2
        grad, = torch.autograd.grad(loss, [twin.ngram_embed], retain_graph=True)
        grad[-1] = 0
        rest.backward(loss)
        rest.step(0.7, 0.9)
        v += grad.square().mean(1)
        twin.ngram_embed.data -= torch.where(v > 0, 0.7 * CFG.ngram_lr / v.sqrt(), 0)[:, None] * grad
        model, optimizer = trained(CFG, step + 1)
        # as a whole: rows that gradients of nearly 0 began differ between CPUs by up to 3e-5
        assert (model.ngram_embed - twin.ngram_embed).norm() < 5e-5 * twin.ngram_embed.norm()
        assert torch.allclose(optimizer.table.v, v, rtol=1e-3, atol=1e-12)
    assert 50 < model.ngram_embed.any(1).sum() < 300 and not model.ngram_embed[-1].any()


def table_after(ranks=1, rank=0, group=None):
    """Four steps of two micro-steps on this rank's part of 12 rows of tokens, with gradients of their own."""
    table = SparseTable(torch.zeros(CFG.ngram_rows + 1, 8), ranks, torch.float32)
    for step in range(4):
        tokens = some_tokens(step, 12)
        grads = torch.randn(*tokens.shape, 8, generator=torch.Generator().manual_seed(step))
        for part in torch.arange(12).chunk(ranks)[rank].chunk(2):
            table.parts.append((ngram_ids(tokens[part], None, CFG), grads[part] * ranks))
        table.step(1 / ranks, 0.1, group)
    return table


def test_fixed_shapes_give_the_same(monkeypatch):
    """On a GPU the sums are as many as the ids, most of them of nothing."""
    alone = table_after()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        fixed = table_after()
    assert torch.equal(alone.data, fixed.data) and torch.equal(alone.v, fixed.v)
    assert not fixed.data[-1].any()


def rank_main(folder, rank, ranks):
    place = f"file://{folder}/meet{ranks}"
    torch.distributed.init_process_group("gloo", place, rank=rank, world_size=ranks)
    table = table_after(ranks, rank, torch.distributed.new_group())
    torch.save((table.data, table.v), f"{folder}/{ranks}_{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_exchange_what_they_touched(tmp_path, forks):
    """2 and 3 ranks by gloo, each with its rows, end with the table of one process."""
    places = [(str(tmp_path), rank, n) for n in (2, 3) for rank in range(n)]
    jobs = [forks.Process(target=rank_main, args=place) for place in places]
    for job in jobs:
        job.start()
    alone = table_after()
    for job in jobs:
        job.join(300)
        job.kill()
    assert [job.exitcode for job in jobs] == [0] * 5 and alone.data.any(1).sum() > 200
    for n in (2, 3):
        tables = [torch.load(tmp_path / f"{n}_{rank}.pt") for rank in range(n)]
        for ours, first, expected in zip(zip(*tables), tables[0], (alone.data, alone.v)):
            assert all(torch.equal(table, first) for table in ours)
            assert ((first - expected).abs() <= 1e-6 * expected.abs().clamp_min(1)).all()


def test_training_at_test_time_leaves_the_table_alone():
    model = randomised(CFG)
    optimizer, before = Optimizer(model, CFG), model.ngram_embed.clone()
    team = fake_team()
    team.dtype = torch.float32
    train_gpt.test_time_step(model, optimizer, CFG, some_tokens(0, 3).flatten().numpy(), team)
    assert torch.equal(model.ngram_embed, before)


def test_files_hold_touched_rows(train):
    """A run with a table of 4 million rows leaves as few bytes as one of a million, and its artifact holds
    the rows within the rounding of int8."""
    small, large = (train(TOY, NGRAM_ROWS=str(rows)) for rows in (1_000_000, 4_000_000))
    assert small.code == large.code == 0
    assert len(large.weights) < 1.03 * len(small.weights)
    exact = train_gpt.load_model(large.folder / "final_model.pt")[0].ngram_embed.data
    read = train_gpt.load_model(large.folder / "final_model.int8.ptz")[0].ngram_embed.data
    used = exact.any(1)
    assert exact.shape == read.shape == (4_000_001, 32) and 1000 < used.sum() < 40_000
    assert not read[~used].any()
    scale = exact[used].abs().amax(1, keepdim=True) / 127
    assert ((read[used] - exact[used]).abs() <= 0.6 * scale).all()       # a scale is fp16
    assert large.result["val_loss"] == pytest.approx(small.result["val_loss"], abs=0.05)


def test_first_values_are_zeros():
    model = train_gpt.GPT(CFG)
    init_parameters(model, 1)
    assert "ngram_embed" not in train_gpt.first_values(model, 1) and not model.ngram_embed.any()
