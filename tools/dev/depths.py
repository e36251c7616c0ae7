"""What the depth dial makes of each depth, beside each other: ./run.sh depths [FLAGS OF train_gpt.py]"""
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
if __name__ == "__main__":  # our modules are those of this checkout, whatever else the path holds
    sys.path[:] = [str(ROOT), *[folder for folder in sys.path if folder != str(HERE)]]
import train_gpt  # noqa: E402
from tools.run.plan import H100_FLOPS, flops_per_token, planned_tokens  # noqa: E402

DEPTHS = range(4, 33, 4)
VOCABULARY = "--vocab-size=32768"   # unless a flag says otherwise
MFU = 0.5                           # model FLOPs utilisation that the hours assume


def rows(flags: list[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yields a line per depth; depths that something given does not fit are left out. Raises Refused."""
    for depth in DEPTHS:
        with suppress(train_gpt.Refused):
            cfg: Any = train_gpt.load_config(env, ["--preset=gpt2", VOCABULARY, *flags, f"--depth={depth}"])
            tokens = planned_tokens(cfg)
            each = flops_per_token(cfg)
            hours = each * tokens / (8 * H100_FLOPS * MFU) / 3600
            yield (f"depth:{depth} parameters:{train_gpt.parameter_counts(cfg).total()} "
                   f"flops_per_token:{each:.4g} tokens:{tokens} batch:{cfg.train_batch_tokens} "
                   f"steps:{cfg.iterations} flops:{each * tokens:.4g} hours:{hours:.2f} "
                   f"(8xH100 at mfu {MFU:g})")


def main(flags: list[str], env: Mapping[str, str]) -> int:
    """Exit code: 0; 2 if the flags suit no depth."""
    found = list(rows(flags, env))
    if found:
        print(*found, sep="\n")
        return 0
    try:        # why
        train_gpt.load_config(env, ["--preset=gpt2", VOCABULARY, *flags, f"--depth={DEPTHS[0]}"])
    except train_gpt.Refused as error:
        print(f"depths: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
