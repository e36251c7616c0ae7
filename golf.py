"""Scores of the golf game by other protocols than the plain one, each under a name of its own.

val_loss_<name> and val_bpb_<name>, in nats per target and bits per byte of the same val text, every token but
the first a target, once, by the artifact's weights as read back. All of them ask log_probs for targets that
its row has not shown; what differs:

sliding    EVAL_SLIDING=n: rows of eval_context tokens, each n after the one before, score their last n.
documents  EVAL_DOCUMENTS=n: the same, but no row reaches back beyond the start of its document. The token
           that begins the next document is the last target of this one.
ttt        EVAL_TTT=n, score-first test-time training: the rows of documents, sliding or else the plain ones,
           in the order of the text. Whenever n more targets are scored, a fresh optimizer's next step, at
           EVAL_TTT_LR of the learning rates, trains on rows of train_seq_len among them; what does not fill a
           row waits for the next step. So the weights that score a token have seen none from it on. The
           weights that everything else uses stay as they are.

What must hold of each: nats of targets before a position do not depend on the tokens from there on, which
target_nats offers for a test. This file counts as code of the artifact. t is the trainer's module.
"""
import math
import time
from collections import namedtuple

import numpy as np
import torch

AT_A_TIME = 16_384  # tokens that a device trains on at once: what fits beside a model of this game

Row = namedtuple("Row", "low first last")  # reads the tokens from low on, scores those from first to last


def names(cfg):
    return [name for name in ("sliding", "documents", "ttt") if getattr(cfg, f"eval_{name}")]


def layout(cfg, name):
    """(whether rows stay within documents, tokens of a row, targets that it scores: at most all)"""
    context, by_document = cfg.eval_context or cfg.train_seq_len, name != "sliding" and cfg.eval_documents
    stride = by_document or cfg.eval_sliding or cfg.eval_stride or context
    return bool(by_document), context, min(stride, context)


def rows_within(start, end, context, stride):
    """Rows that score the tokens start + 1 to end once: the first as many as it holds, then stride each.
    Where a row begins does not depend on the end: that is later text."""
    rows, first = [], start + 1
    while first <= end:
        share = stride if rows else context
        rows.append(Row(max(start, first + share - 1 - context), first, min(end, first + share - 1)))
        first += share
    return rows


def rows_of(cfg, name, tokens, bos):
    """All rows of a protocol, in the order of the text."""
    by_document, context, stride = layout(cfg, name)
    begins = np.flatnonzero(tokens == bos).tolist() if by_document else []
    edges = sorted({0, *begins, len(tokens) - 1})
    return [row for start, stop in zip(edges, edges[1:]) for row in rows_within(start, stop, context, stride)]


def score_rows(t, model, cfg, tokens, rows, team, nats):
    """Writes the nats of this rank's share of the rows' targets into nats (tokens,)."""
    mine = rows[team.rank::team.world_size]
    asked = [(tokens[row.low:row.last + 1], row.first - row.low) for row in mine]
    for owners, _, found, _ in t.scored(model, cfg, asked, team):
        begins = np.flatnonzero(np.diff(owners, prepend=-1))
        inside = np.arange(len(owners)) - np.repeat(begins, np.diff(begins, append=len(owners)))
        nats[np.array([row.first for row in mine])[owners] + inside] = found


def train_on(t, model, optimizer, cfg, tokens, team):
    """One step on len(tokens) // train_seq_len rows, AT_A_TIME tokens of them at a time. Unlike train_step's
    they may be any number: parts weigh as they are long, and a rank may have none."""
    T, rank, ranks = cfg.train_seq_len, team.rank, team.world_size
    rows = np.stack([tokens[low:low + T + 1] for low in range(0, len(tokens) - T, T)])
    rows = torch.from_numpy(rows.astype(np.int64))
    model.set_context(T, cfg.window_schedule[-1])
    for part in rows[rank::ranks].split(max(1, AT_A_TIME // T)) if len(rows) > rank else ():
        part = part.to(team.device)
        loss = model(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        (loss * (len(part) * ranks / len(rows))).backward()  # the optimizer divides by ranks
    optimizer.step(cfg.eval_ttt_lr, cfg.muon_momentum)


def target_nats(t, model, cfg, tokens, bos, name, team):
    """float64 (len(tokens),): nats of each token given those before it, by this protocol; 0 for the first and
    for the targets of other ranks. model stays as it is."""
    nats, rows = np.zeros(len(tokens)), rows_of(cfg, name, tokens, bos)
    if name != "ttt":
        score_rows(t, model, cfg, tokens, rows, team, nats)
        return nats
    own = t.GPT(cfg, model.dtype).to(team.device)
    own.load_state_dict(model.state_dict())
    optimizer = t.Optimizer(own, cfg, team.rank, team.world_size)
    waiting, scored, trained = [], 0, 0  # rows to score; the last token that was scored, and trained on
    for row in rows:
        waiting.append(row)
        if row.last - scored >= cfg.eval_ttt or row is rows[-1]:
            score_rows(t, own, cfg, tokens, waiting, team, nats)
            waiting, scored = [], row.last
            full = (scored - trained) // cfg.train_seq_len * cfg.train_seq_len
            if full and row is not rows[-1]:
                train_on(t, own, optimizer, cfg, tokens[trained:trained + full + 1], team)
                trained += full
    return nats


def protocol(cfg, name):
    """One sentence for the log."""
    by_document, context, stride = layout(cfg, name)
    text = f"rows of {context} tokens{' within documents' * by_document} score {stride} targets each"
    if name == "ttt":
        text += f"; then a step at {cfg.eval_ttt_lr:g} of the learning rates on every {cfg.eval_ttt} of them"
    return text


def further_scores(t, model, cfg, data, team, log):
    """Part of the result: val_loss (val_loss_partial where the plain one is), val_bpb (None for a part of
    val) and milliseconds of each protocol."""
    found, tokens = {}, data.val[:cfg.val_tokens or None]
    whole = data.val_bytes and len(tokens) == len(data.val)
    kind = t.score_text(cfg, t.Score(0.0, None, None)).split(":")[0]
    if data.bos < 0 and cfg.eval_documents:
        log("final_documents: left out, as no token begins documents here")
        cfg = t.replace(cfg, eval_documents=0)
    for name in names(cfg):
        start = time.perf_counter()
        nats = target_nats(t, model, cfg, tokens, cfg.bos_id, name, team).sum()
        nats = t.all_reduce(torch.tensor(nats, dtype=torch.float64)).item()
        loss, bpb = nats / (len(tokens) - 1), nats / math.log(2) / data.val_bytes if whole else None
        ms = round(1e3 * (time.perf_counter() - start))
        if not math.isfinite(loss):
            log(f"final_{name}: {loss}, so there is none: lower EVAL_TTT_LR")
            continue
        log(f"final_{name} {kind}_{name}:{loss:.8f}" + (f" val_bpb_{name}:{bpb:.8f}" if whole else "") +
            f" eval_time:{ms}ms ({protocol(cfg, name)})")
        found |= {f"{kind}_{name}": loss, f"val_bpb_{name}": bpb, f"eval_{name}_ms": ms}
    return found
