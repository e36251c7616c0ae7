"""golf: which of our parameters and constants are which of golden/golf.npz,
and tests of what this set alone holds. Runs with test_golden.py."""
import pytest
import torch

from golden_common import Seed, replace, set_fixture


class Golf(Seed):
    FILE = "golf.npz"
    RATES_OF_TALL = False
    SCALARS = ()

    def ours(self, w):
        found = {"embed": w["tok_emb.weight"], "skip_weights": w["skip_weights"]}
        layers = sum(name.endswith(".resid_mix") for name in w)
        for block in (f"blocks.{i}." for i in range(layers)):
            found |= {
                block + "query": w[block + "attn.c_q.weight"],
                block + "key": w[block + "attn.c_k.weight"],
                block + "value": w[block + "attn.c_v.weight"],
                block + "attn_proj": w[block + "attn.proj.weight"],
                block + "qk_gain": w[block + "attn.q_gain"],
                block + "fc": w[block + "mlp.fc.weight"],
                block + "mlp_proj": w[block + "mlp.proj.weight"],
                block + "resid_lambda": w[block + "resid_mix"][0],
                block + "x0_lambda": w[block + "resid_mix"][1],
                block + "layer_scale": torch.stack([w[block + "attn_scale"], w[block + "mlp_scale"]])}
        return found

    def packing_config(self, about):
        return replace(self.cfg, train_seq_len=about["row_tokens"], train_batch_tokens=about["batch_tokens"])

    def validation_config(self, context, targets):
        return replace(self.cfg, eval_context=context, eval_stride=0, val_tokens=targets)


golf = set_fixture(Golf)


def test_golf_warmdown_follows_the_clock(golf):
    for step, ms, lr in golf.array("schedule_clock").tolist():
        assert golf.schedule.at(int(step), ms / 1000).lr == pytest.approx(lr, abs=1e-9), (step, ms)


def test_golf_artifact(golf):
    """int8 rows and scales of given weights, and what comes back of them."""
    weights = golf.their_weights("artifact.w")
    large = golf.their_weights("artifact.q")
    assert large
    for name, q in large.items():
        ours, scale = golf.full.quantize(golf.full.parameter_table()["query"], weights[name])
        assert torch.equal(ours, q), name
        assert torch.equal(scale, golf.their_weights("artifact.scale")[name]), name
        back = golf.their_weights("artifact.back")[name]
        torch.testing.assert_close(ours.float() * scale.float()[:, None], back, rtol=0, atol=0)
    kept = golf.their_weights("artifact.kept")
    dtypes = {name: w.dtype for name, w in kept.items()}
    assert {torch.float16, torch.float32} == set(dtypes.values())
    for name, w in kept.items():
        assert torch.equal(weights[name].to(w.dtype), w), name
