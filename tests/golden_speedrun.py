"""speedrun: which of our parameters and constants are which of golden/speedrun.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
import re

import pytest
import torch

from golden_common import Seed, WithWindows, replace, set_fixture


class Speedrun(WithWindows, Seed):
    FILE = "speedrun.npz"
    RATES_OF_TALL = True
    SCALARS = ("resid_lambda", "x0_lambda", "value_lambdas")
    TABLES = ("embed", "value_embeds", "head")
    # ours are counted from the first layer that has one: theirs of our first, second, third
    VALUE_TABLES = (1, 2, 0)
    SKIP = 1    # the only skip weight that acts

    def ours(self, w):
        N = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
        C = w["embed.weight"].size(1)
        scalars = w["scalars"]
        mixes = scalars[N:3 * N].view(N, 2)
        factors = scalars[3 * N:5 * N].view(N, 2)
        found = {
            "embed": w["embed.weight"], "head": w["lm_head.weight"], "smear_gate": w["smear_gate.weight"],
            "skip_weights": scalars[self.SKIP].view(1, 1), "smear": scalars[5 * N].view(1, 1),
            "backout": scalars[5 * N + 1:5 * N + 2]}
        for n, table in enumerate(self.VALUE_TABLES):
            found[f"value_embeds.{n}"] = w[f"value_embeds.{table}.weight"]
        for i in range(N):
            block = f"blocks.{i}."
            if block + "attn.qkvo_w" in w:
                parts = w[block + "attn.qkvo_w"].view(4, C, C)
                for name, part in zip(("query", "key", "value", "attn_proj"), parts):
                    found[block + name] = part
                found[block + "attn_gate"] = w[block + "attn.attn_gate.weight"]
                found[block + "value_lambdas"] = factors[i]
            if block + "mlp.c_fc" in w:
                found |= {
                    block + "fc": w[block + "mlp.c_fc"].T, block + "mlp_proj": w[block + "mlp.c_proj"],
                    block + "resid_lambda": mixes[i, :1], block + "x0_lambda": mixes[i, 1:]}
        return found

    def scale_in(self, context):
        return context.attn_scale.item()

    def rope(self, cfg, window):
        return cfg.rope(window)[0]

    def attn_scale(self, cfg, stage):
        return cfg.rope(stage.window)[1]

    def rows_at_once(self, batch):
        return len(batch[0]) // 2       # gradients of micro-steps add up

    def grad_factor(self, row, batch):
        """The trainer's, which is theirs."""
        factor = batch[0].numel() / self.cfg.loss_sum_ranks
        assert factor == row["gradient_factor"]
        return factor

    def decay_at(self, row):
        """They state wd before rate and LR factor."""
        return row["wd"] * self.cfg.matrix_lr * row["lr"]

    def unit_decay(self, about):
        return about["wd"] * about["lr"]

    def stated_decay(self, about):
        return about["wd"] * about["wd_mult"] * about["lr"] if about["optimizer"] == "normuon" else 0

    def unit_kind(self, name):
        kinds = {"muon.attn": "query", "muon.c_fc": "fc", "muon.c_proj": "mlp_proj",
                 "muon.attn_gate": "attn_gate", "muon.smear_gate": "smear_gate"}
        return kinds[name], name == "muon.c_fc"

    def first_values(self, name, about):
        """Of scalars: "12-35 (1.1, 0) per layer"; of the four matrices in one the last is 0."""
        law = about["init"]
        if law["kind"] != "parts":
            return super().first_values(name, about)
        if name.endswith("attn.qkvo_w"):
            assert law["parts"][0].endswith("query, key, value uniform, output 0")
            values = torch.tensor([torch.inf, torch.inf, torch.inf, 0], dtype=torch.float64)
            C = about["shape"][0]
            return values.view(4, 1, 1).expand(4, C, C).reshape(about["shape"])
        values = torch.full(about["shape"], torch.inf, dtype=torch.float64)
        for part in law["parts"]:
            low, high, rest = re.fullmatch(r"(\d+)(?:-(\d+))? (.*)", part).groups()
            numbers = torch.tensor([float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", rest)]).double()
            place = values[int(low):int(high or low) + 1]
            place.copy_(numbers.repeat(len(place) // len(numbers)))
        return values

    def packing_config(self, about):
        """Of one stage only."""
        return replace(self.cfg, train_seq_len=about["row_tokens"], train_batch_tokens=about["batch_tokens"],
                       max_epochs=0, batch_schedule=(1,), seq_schedule=(1,), max_doc_len=about["max_doc_len"],
                       bos_id=about["bos"])

    def validation_config(self, context, targets):
        return replace(self.cfg, eval_context=context, eval_stride=0, val_tokens=targets)


speedrun = set_fixture(Speedrun)


def test_speedrun_evaluation_windows(speedrun):
    """Those of the last validation at full size, with the last stage's RoPE."""
    about = speedrun.json("evaluation")
    cfg = speedrun.full
    sizes = cfg.windows(None, cfg.eval_context)
    assert (sizes["L"], sizes["S"]) == (about["window_long"], about["window_short"])
    assert cfg.rope(cfg.scoring_window())[1] == pytest.approx(about["attn_scale"], rel=1e-6)
